"""The ``chunkcache`` command. Each command has a file; heavy imports wait until a command runs."""
