"""A mixture-of-experts model that records its routing, and a demonstration of the whole path with it.

Nothing here is imported by ``import arrow_tq``; torch and transformers are loaded when a model is made.
"""
