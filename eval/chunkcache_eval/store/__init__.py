"""What each codec costs and gives: bytes per token, warm loads beside memcpy, added KL."""
