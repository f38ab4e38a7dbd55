"""The store interface over Arrow Flight."""

from arrow_tq.client.backend import FlightBackend
from arrow_tq.client.options import ClientOptions

__all__ = ["ClientOptions", "FlightBackend"]
