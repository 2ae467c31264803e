"""The engine: one thread that owns the model."""
