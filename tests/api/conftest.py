"""What the API's tests share: a tiny model, a runtime, and a server over it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from chunkcache.runtime import Runtime
from chunkcache.settings import load_settings
from chunkcache.testing import write_tiny_model
from chunkcache_api.app import create_app

MakeRuntime = Callable[..., Runtime]
Serve = Callable[[FastAPI], AbstractContextManager[httpx.Client]]
WaitUntil = Callable[[Callable[[], bool]], None]
BusyEngine = Callable[[Runtime], AbstractContextManager[None]]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(
        tmp_path_factory.mktemp("models") / "tiny-llama", max_position_embeddings=2048
    )


@pytest.fixture(scope="session")
def make_runtime(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeRuntime:
    """Open a runtime over a store of its own; the caller closes it."""

    def make(**settings: object) -> Runtime:
        folder = tmp_path_factory.mktemp("runtime")
        values: dict[str, object] = {
            "model": str(model_dir),
            "store": folder / "store",
            "cache_dir": folder / "cache",
            "store_max_bytes": 256 << 20,
            "chunk_tokens": 32,
            "min_fused_context_tokens": 0,
            "min_mean_chunk_tokens": 0,
            "pool_tokens": 8192,
            "kept_prompts_ratio": 0.0,  # most tests ask the same twice to see a tier
        }
        return Runtime.open(load_settings(**values | settings))

    return make


@pytest.fixture(scope="session")
def busy_engine() -> BusyEngine:
    """The engine's thread is in the middle of something, for as long as the context lasts."""

    @contextmanager
    def busy(runtime: Runtime) -> Iterator[None]:
        is_busy, may_end = threading.Event(), threading.Event()

        def work() -> None:
            is_busy.set()
            may_end.wait()

        future = runtime.engine.call(work)
        is_busy.wait()
        try:
            yield
            assert not future.done()
        finally:
            may_end.set()

    return busy


@pytest.fixture(scope="module")
def runtime(make_runtime: MakeRuntime) -> Iterator[Runtime]:
    with make_runtime() as runtime:
        yield runtime
        assert runtime.engine.num_open_requests == 0
        assert runtime.stack.stats().leases_open == 0
        runtime.stack.check_integrity()


@pytest.fixture(scope="module")
def client(runtime: Runtime, serve: Serve) -> Iterator[httpx.Client]:
    with serve(create_app(runtime, max_body_bytes=1 << 20)) as client:
        yield client


@pytest.fixture(scope="module")
def handbook(client: httpx.Client) -> str:
    """A stored document of several chunks; gives its id."""
    text = " ".join(f"The code of door {n} is {n * 37 % 1000}." for n in range(12))
    assert client.put("/v1/documents/handbook", json={"text": text}).status_code == 201
    return "handbook"
