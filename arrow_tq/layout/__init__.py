"""How chunks lie in an extent: the bytes of an Arrow IPC stream, written in place and read as views.

No files and no index here: the store, and a client on the same host, bring the memory.
"""
