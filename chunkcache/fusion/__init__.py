"""Fusion: place entries, select rows, recompute them."""
