"""Recompute policies, one file each."""
