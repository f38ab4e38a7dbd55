"""``python -m arrow_tq.cli`` is the command ``arrow-tq``."""

from arrow_tq.cli.main import main

main()
