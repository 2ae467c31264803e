"""Settles what must be in the environment before anything imports Triton."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
