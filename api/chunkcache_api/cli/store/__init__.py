"""``chunkcache store``: looking after a store."""
