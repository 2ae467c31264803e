"""Attention of scattered query rows over paged keys and values."""
