"""``python -m arrow_tq_server``: the same as ``arrow-tq serve``."""

from arrow_tq_server.main import main

main()
