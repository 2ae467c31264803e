"""Place kept keys and values into page slots, rotating the keys on the way."""
