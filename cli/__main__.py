"""``python -m cli`` is the command ``hedgerow``."""

from cli.main import main

main()
