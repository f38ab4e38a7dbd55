"""The consuming side: claimed batches, and how their payload is fetched."""
