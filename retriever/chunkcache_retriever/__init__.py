"""Finds the chunks of a tenant's documents that a question needs."""
