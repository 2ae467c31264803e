"""API keys: their file, who may do what, whose data a request sees."""
