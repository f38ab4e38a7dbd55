"""The store interface over Arrow Flight."""

from arrow_tq.client.backend import FlightBackend
from arrow_tq.client.options import ClientOptions
from arrow_tq.client.tls import Tls

__all__ = ["ClientOptions", "FlightBackend", "Tls"]
