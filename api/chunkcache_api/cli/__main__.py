"""``python -m chunkcache_api.cli`` is the ``chunkcache`` command."""

from chunkcache_api.cli.app import main

main()
