"""The remote tier: entries in an object store or a Redis, shared by several machines."""
