"""``GET /v1/models``: the model, and how close its fused answers are once that was measured."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
from fastapi import FastAPI

from chunkcache.probing import measure_fidelity
from chunkcache.runtime import Runtime
from chunkcache.testing import write_tiny_model
from chunkcache_api.app import create_app

Serve = Callable[[FastAPI], AbstractContextManager[httpx.Client]]


def test_fidelity_is_null_with_a_hint_until_it_is_measured(
    make_runtime: Callable[..., Runtime], serve: Serve, tmp_path: Path
) -> None:
    model = write_tiny_model(tmp_path / "roomy", max_position_embeddings=8192)
    with make_runtime(model=str(model)) as runtime, serve(create_app(runtime)) as client:
        (before,) = client.get("/v1/models").json()["data"]
        assert before["id"] == "roomy"
        assert before["max_positions"] == 8192
        assert before["fidelity"] is None
        assert "chunkcache doctor" in before["fidelity_hint"]
        report = measure_fidelity(runtime)
        (after,) = client.get("/v1/models").json()["data"]
        assert after["fidelity_hint"] is None
        fidelity = after["fidelity"]
        assert fidelity["mean_kl"] == report.mean_kl
        assert fidelity["agreement"] == report.agreement
        assert fidelity["charged_ratio"] == report.charged_ratio
        assert fidelity["closeness"] == report.closeness
        assert client.get("/v1/documents").json()["data"] == []
