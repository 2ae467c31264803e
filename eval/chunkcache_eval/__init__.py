"""Measurements: speed, memory and, later, quality, each printed with how it was made."""
