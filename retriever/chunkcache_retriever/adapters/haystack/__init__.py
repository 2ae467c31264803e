"""Haystack: chat generator, document store and retriever. ``pip install 'chunkcache[haystack]'``."""
