"""The way around the wire: a client on the server's machine maps what the server's extents hold."""

from arrow_tq.client.samehost.reads import HostReads
from arrow_tq.client.samehost.writes import HostWrites

__all__ = ["HostReads", "HostWrites"]
