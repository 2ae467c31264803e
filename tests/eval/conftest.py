"""Fixtures of quality runs on a tiny model."""

from collections.abc import Callable
from pathlib import Path

import pytest

from chunkcache.settings import Settings, load_settings


@pytest.fixture
def settings(model_dir: Callable[..., Path], cache_dir: Path) -> Settings:
    return load_settings(
        model=str(model_dir(max_position_embeddings=2048)),
        cache_dir=cache_dir,
        codec="raw",
        pool_tokens=4096,
        store_max_bytes=1 << 30,
    )
