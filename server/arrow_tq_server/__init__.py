"""The Flight server: a thin skin over the engine."""
