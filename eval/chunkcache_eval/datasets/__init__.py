"""Loaders of question sets."""
