"""What requests may hold: pydantic models, strict, without unknown fields."""
