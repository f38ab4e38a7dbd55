"""The proxy's own endpoints, under ``/arrow-tq``."""
