"""``/v1/cache``: figures, clearing and collecting, for operators."""

import time
from typing import Any

import httpx
import pytest

from chunkcache.chunk_cache import ChunkCache
from chunkcache.runtime import Runtime
from chunkcache_api.app import create_app

TEXT = " ".join(f"Crate {n} stands in row {n * 11 % 40}." for n in range(12))


def refusal(response: httpx.Response) -> tuple[int, str, str | None]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


def test_figures(client: httpx.Client, runtime: Runtime) -> None:
    put = client.put("/v1/documents/crates", json={"text": TEXT}).json()
    stats = client.get("/v1/cache/stats").json()
    assert stats["tiers"]["disk"]["entries"] >= put["num_chunks"]
    assert stats["tiers"]["host"]["bytes"] > 0
    assert stats["tenant"]["documents"] >= 1
    assert stats["tenant"]["tokens"] >= put["num_tokens"]
    assert stats["tenant"]["quota"] is None
    assert 0 < stats["store"]["live_bytes"] <= stats["store"]["file_bytes"]


def test_a_quota_is_shown(make_runtime, serve) -> None:
    with make_runtime(tenant_max_bytes=1 << 30) as runtime, serve(create_app(runtime)) as client:
        client.put("/v1/documents/crates", json={"text": TEXT}).raise_for_status()
        quota = client.get("/v1/cache/stats").json()["tenant"]["quota"]
        assert quota["max_bytes"] == 1 << 30
        assert 0 < quota["used_bytes"] < 1 << 30


def test_clearing_drops_entries_and_no_document(client: httpx.Client, runtime: Runtime) -> None:
    client.put("/v1/documents/crates", json={"text": TEXT}).raise_for_status()
    other = ChunkCache(runtime, "somebody else")
    theirs = other.put("theirs", TEXT)
    ask: dict[str, Any] = {"query": "Where?", "document_ids": ["crates"], "max_tokens": 4}
    before = client.post("/v1/query", json=ask).json()
    cleared = client.post("/v1/cache/clear", json={}).json()
    assert cleared["tiers"] == ["host"]
    assert cleared["dropped_entries"] > 0
    after = client.post("/v1/query", json=ask).json()
    assert after["answer"] == before["answer"]
    assert after["chunkcache"]["documents"][0]["source"] == "disk"
    client.post("/v1/cache/clear", json={"tiers": ["host", "disk"]}).raise_for_status()
    again = client.post("/v1/query", json=ask).json()
    assert again["answer"] == before["answer"]
    assert again["chunkcache"]["documents"][0]["source"] == "computed"
    # What another tenant has is where it was.
    assert other.put("theirs", TEXT).reused_chunks == theirs.num_chunks
    assert client.get("/v1/documents/crates").json()["text"] == TEXT
    other.delete("theirs")


def test_collecting_removes_what_has_expired(client: httpx.Client, runtime: Runtime) -> None:
    body = {"text": "Gone in a moment, whatever it says.", "expires_at": time.time() + 0.05}
    client.put("/v1/documents/moment", json=body).raise_for_status()
    while client.get("/v1/documents/moment").status_code == 200:
        pass
    dry = client.post("/v1/cache/gc", json={"dry_run": True}).json()
    assert (dry["dry_run"], dry["expired_documents"]) == (True, 1)
    done = client.post("/v1/cache/gc", json={}).json()
    assert (done["dry_run"], done["expired_documents"]) == (False, 1)
    assert client.post("/v1/cache/gc", json={}).json()["expired_documents"] == 0
    runtime.stack.check_integrity()


@pytest.mark.parametrize(
    ("url", "body", "code", "param"),
    [
        ("clear", {"tiers": []}, "invalid_value", "tiers"),
        ("clear", {"tiers": ["device"]}, "invalid_value", "tiers[0]"),
        ("clear", {"nonsense": 1}, "unsupported_parameter", "nonsense"),
        ("gc", {"drop_models": ["xyz"]}, "invalid_value", "drop_models[0]"),
        ("gc", {"drop_models": ["00000000"]}, "invalid_value", "drop_model"),
        ("gc", {"dry_run": "yes"}, "invalid_value", "dry_run"),
    ],
)
def test_what_is_refused(
    client: httpx.Client, url: str, body: dict[str, Any], code: str, param: str
) -> None:
    assert refusal(client.post(f"/v1/cache/{url}", json=body)) == (400, code, param)


def test_finished_prompts_are_told_counted_and_cleared(make_runtime, serve) -> None:
    ask: dict[str, Any] = {"query": "Where?", "document_ids": ["crates"], "max_tokens": 4}
    dry = ask | {"chunkcache": {"dry_run": True}}
    with (
        make_runtime(kept_prompts_ratio=0.5) as runtime,
        serve(create_app(runtime)) as client,
    ):
        client.put("/v1/documents/crates", json={"text": TEXT}).raise_for_status()
        assert client.post("/v1/query", json=dry).json()["kept_prompt_tokens"] == 0
        first = client.post("/v1/query", json=ask).json()
        plan = client.post("/v1/query", json=dry).json()
        assert plan["kept_prompt_tokens"] == plan["prompt_tokens"] > plan["exact_prefix_tokens"]
        again = client.post("/v1/query", json=ask).json()
        assert again["answer"] == first["answer"]
        details = again["usage"]["prompt_tokens_details"]
        assert details["cached_tokens_by_source"]["device"] == plan["prompt_tokens"]
        assert details["exact_prefix_tokens"] == plan["exact_prefix_tokens"]
        assert client.get("/v1/cache/stats").json()["kept_prompts"]["hits"] == 1
        metrics = client.get("/metrics").text
        assert "chunkcache_kept_prompt_hits_total" in metrics
        cleared = client.post("/v1/cache/clear", json={}).json()
        assert cleared["dropped_prompt_tokens"] >= plan["prompt_tokens"]
        assert client.post("/v1/query", json=dry).json()["kept_prompt_tokens"] == 0
