"""``/v1/vector_stores`` through the OpenAI Python client, and what it refuses."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from chunkcache.runtime import Runtime
from chunkcache_api.app import create_app
from chunkcache_retriever.retriever import Retriever
from chunkcache_retriever.testing import FixedEmbedder

TEXTS = {
    "pump.txt": "The pump leaks at the valve.",
    "fan.txt": "The fan is loud at night.",
    "tap.txt": "The tap has a valve as well.",
}


@pytest.fixture(scope="module")
def client(runtime: Runtime, serve) -> Iterator[httpx.Client]:
    app = create_app(runtime, retriever_factory=lambda c: Retriever(c, FixedEmbedder()))
    with serve(app) as opened:
        yield opened


@pytest.fixture(scope="module")
def api(client: httpx.Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{client.base_url}/v1",
        api_key="none",
        max_retries=0,
        _strict_response_validation=True,
    ) as api:
        yield api


@pytest.fixture(scope="module")
def ids(api: openai.OpenAI) -> dict[str, str]:
    return {
        name: api.files.create(file=(name, text.encode()), purpose="assistants").id
        for name, text in TEXTS.items()
    }


def refusal(response: httpx.Response) -> tuple[int, str, str | None]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


def test_a_store_lives_from_creation_to_deletion(api: openai.OpenAI, ids: dict[str, str]) -> None:
    store = api.vector_stores.create(
        name="machines", metadata={"site": "north"}, file_ids=[ids["pump.txt"]]
    )
    assert store.id.startswith("vs_")
    assert (store.name, store.metadata, store.status) == (
        "machines",
        {"site": "north"},
        "completed",
    )
    assert (store.file_counts.completed, store.file_counts.total) == (1, 1)
    assert store.usage_bytes == len(TEXTS["pump.txt"])
    assert api.vector_stores.retrieve(store.id) == store

    file = api.vector_stores.files.create(
        vector_store_id=store.id, file_id=ids["fan.txt"], attributes={"floor": 2, "loud": True}
    )
    assert (file.id, file.status, file.vector_store_id) == (
        ids["fan.txt"],
        "completed",
        store.id,
    )
    assert file.attributes == {"floor": 2, "loud": True}
    found = list(api.vector_stores.files.list(store.id))
    assert {f.id for f in found} == {ids["pump.txt"], ids["fan.txt"]}
    same = api.vector_stores.files.retrieve(ids["fan.txt"], vector_store_id=store.id)
    assert same == file
    changed = api.vector_stores.files.update(
        ids["fan.txt"], vector_store_id=store.id, attributes={"floor": 3}
    )
    assert changed.attributes == {"floor": 3}
    content = api.vector_stores.files.content(ids["fan.txt"], vector_store_id=store.id)
    assert "".join(part.text or "" for part in content) == TEXTS["fan.txt"]
    polled = api.vector_stores.files.create_and_poll(ids["tap.txt"], vector_store_id=store.id)
    assert polled.status == "completed"

    gone = api.vector_stores.files.delete(ids["fan.txt"], vector_store_id=store.id)
    assert gone.deleted
    with pytest.raises(openai.NotFoundError):
        api.vector_stores.files.retrieve(ids["fan.txt"], vector_store_id=store.id)
    assert api.files.retrieve(ids["fan.txt"]).filename == "fan.txt"

    renamed = api.vector_stores.update(store.id, name="pumps")
    assert (renamed.name, renamed.metadata) == ("pumps", {"site": "north"})
    assert api.vector_stores.delete(store.id).deleted
    with pytest.raises(openai.NotFoundError) as caught:
        api.vector_stores.retrieve(store.id)
    assert caught.value.code == "collection_not_found"
    assert api.files.content(ids["pump.txt"]).text == TEXTS["pump.txt"]


def test_a_search_stays_within_the_store(api: openai.OpenAI, ids: dict[str, str]) -> None:
    store = api.vector_stores.create(file_ids=[ids["pump.txt"], ids["fan.txt"]])
    (best, *rest) = api.vector_stores.search(store.id, query="Where is the valve?")
    assert (best.file_id, best.filename) == (ids["pump.txt"], "pump.txt")
    assert best.content[0].text == TEXTS["pump.txt"]
    assert {hit.file_id for hit in rest} <= {ids["fan.txt"]}
    assert all(best.score >= hit.score for hit in rest)

    api.vector_stores.files.create(
        vector_store_id=store.id, file_id=ids["tap.txt"], attributes={"room": "kitchen"}
    )
    kitchen: Any = {"type": "eq", "key": "room", "value": "kitchen"}
    found = api.vector_stores.search(store.id, query="valve", filters=kitchen)
    assert [(h.file_id, h.attributes) for h in found] == [(ids["tap.txt"], {"room": "kitchen"})]
    both = api.vector_stores.search(store.id, query=["leaks", "loud night"], max_num_results=2)
    assert {h.file_id for h in both} == {ids["pump.txt"], ids["fan.txt"]}
    none = api.vector_stores.search(
        store.id, query="valve", ranking_options={"score_threshold": 1e9}
    )
    assert list(none) == []
    empty = api.vector_stores.create(name="empty")
    assert list(api.vector_stores.search(empty.id, query="valve")) == []
    for each in (store, empty):
        api.vector_stores.delete(each.id)


def test_a_deleted_file_is_in_no_store(api: openai.OpenAI) -> None:
    file = api.files.create(file=("x.txt", b"The mast is tall."), purpose="assistants")
    store = api.vector_stores.create(file_ids=[file.id])
    api.files.delete(file.id)
    assert api.vector_stores.retrieve(store.id).file_counts.total == 0
    assert list(api.vector_stores.files.list(store.id)) == []
    api.vector_stores.delete(store.id)


def test_pages_of_stores(api: openai.OpenAI, client: httpx.Client) -> None:
    made = [api.vector_stores.create(name=f"set {n}").id for n in range(5)]
    assert [s.id for s in api.vector_stores.list(limit=2)] == made[::-1]
    page = client.get("/v1/vector_stores", params={"before": made[0], "limit": 2}).json()
    assert [s["id"] for s in page["data"]] == [made[2], made[1]]
    assert (page["first_id"], page["last_id"], page["has_more"]) == (made[2], made[1], True)
    for name in made:
        api.vector_stores.delete(name)


@pytest.mark.parametrize(
    ("method", "url", "body", "status", "code", "param"),
    [
        ("GET", "/vs_no", None, 404, "collection_not_found", "vector_store_id"),
        ("DELETE", "/vs_no", None, 404, "collection_not_found", "vector_store_id"),
        ("POST", "/vs_no", {"name": "x"}, 404, "collection_not_found", "vector_store_id"),
        ("GET", "/vs_no/files", None, 404, "collection_not_found", "vector_store_id"),
        ("GET", "/vs_no/files/x", None, 404, "collection_not_found", "vector_store_id"),
        ("POST", "/vs_no/search", {"query": "x"}, 404, "collection_not_found", "vector_store_id"),
        ("POST", "/vs_no/files", {"file_id": "x"}, 404, "collection_not_found", "vector_store_id"),
        ("POST", "", {"file_ids": ["no"]}, 404, "document_not_found", "document_id"),
        ("POST", "", {"expires_after": {"days": 1}}, 400, "unsupported_parameter", None),
        ("POST", "", {"chunking_strategy": {"type": "static"}}, 400, "unsupported_parameter", None),
        ("POST", "", {"name": "x" * 513}, 400, "invalid_value", "name"),
        ("POST", "", {"name": "x\n"}, 400, "invalid_value", "name"),
        ("POST", "", {"metadata": {"k" * 65: "v"}}, 400, "invalid_value", None),
        ("POST", "", {"nonsense": 1}, 400, "unsupported_parameter", "nonsense"),
        ("POST", "/STORE/files", {"file_id": "no"}, 404, "document_not_found", "document_id"),
        ("POST", "/STORE/files", {}, 400, "invalid_value", "file_id"),
        ("POST", "/STORE/files/no", {"attributes": {}}, 404, "document_not_found", None),
        ("DELETE", "/STORE/files/no", None, 404, "document_not_found", "document_id"),
        ("GET", "/STORE/files?filter=x", None, 400, "invalid_value", "filter"),
        ("GET", "/STORE/files?limit=101", None, 400, "invalid_value", "limit"),
        ("GET", "/STORE/files?after=no", None, 400, "invalid_value", "after"),
        ("POST", "/STORE/search", {}, 400, "invalid_value", "query"),
        ("POST", "/STORE/search", {"query": " "}, 400, "invalid_value", "query"),
        ("POST", "/STORE/search", {"query": []}, 400, "invalid_value", "query"),
        ("POST", "/STORE/search", {"query": "x", "max_num_results": 51}, 400, None, None),
        ("POST", "/STORE/search", {"query": "x", "rewrite_query": True}, 400, None, None),
        ("POST", "/STORE/search", {"query": "x", "filters": {"type": "x"}}, 400, None, None),
    ],
)
def test_what_is_refused(
    client: httpx.Client,
    ids: dict[str, str],
    method: str,
    url: str,
    body: dict[str, Any] | None,
    status: int,
    code: str | None,
    param: str | None,
) -> None:
    store = client.post("/v1/vector_stores", json={"file_ids": [ids["fan.txt"]]}).json()["id"]
    response = client.request(method, f"/v1/vector_stores{url.replace('STORE', store)}", json=body)
    client.delete(f"/v1/vector_stores/{store}").raise_for_status()
    found = refusal(response)
    assert found[0] == status
    assert code in (None, found[1])
    assert param in (None, found[2])


def test_without_a_retriever_there_is_no_search(runtime: Runtime, serve) -> None:
    with serve(create_app(runtime)) as plain:
        store = plain.post("/v1/vector_stores", json={}).json()["id"]
        refused = plain.post(f"/v1/vector_stores/{store}/search", json={"query": "x"})
        assert refusal(refused)[:2] == (400, "unsupported_parameter")
        plain.delete(f"/v1/vector_stores/{store}").raise_for_status()
