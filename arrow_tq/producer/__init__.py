"""The producing side: sessions, their steps, and how arrays become chunks."""
