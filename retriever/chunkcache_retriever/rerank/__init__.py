"""Rerankers: score a search's best passages again, each with the question."""
