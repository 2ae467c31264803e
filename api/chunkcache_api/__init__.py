"""The REST API and the ``chunkcache`` command."""
