"""Attention of one new row per sequence over paged keys and values."""
