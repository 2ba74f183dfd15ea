"""``python -m server`` is the command ``hedgerow``."""

from server.cli import main

main()
