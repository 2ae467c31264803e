"""Quantise keys and values to int8 or fp8 with scales."""
