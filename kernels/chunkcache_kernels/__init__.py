"""Operators over paged keys and values; each has a reference and faster implementations."""
