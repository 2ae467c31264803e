"""Replaying recorded traffic through the RAM tier, without a model."""
