"""Calibrating the policy ``auto``, and checking on held-back questions that it keeps its promise."""
