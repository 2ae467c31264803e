"""``/v1/documents``: store, read, list, delete; ids are opaque."""

import os
from pathlib import Path

import httpx
import pytest

from chunkcache.documents import text_digest
from chunkcache.runtime import Runtime

TEXT = "The harbour opens at seven.\n\nThe ferry leaves from the northern pier at nine."


def url(document_id: str) -> str:
    """Every byte encoded, dots too: nothing on the way may resolve them."""
    return "/v1/documents/" + "".join(f"%{b:02X}" for b in document_id.encode())


def refusal(response: httpx.Response) -> tuple[int, str, str | None]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


def test_a_document_lives_through_its_versions(client: httpx.Client) -> None:
    put = client.put("/v1/documents/ferry", json={"text": TEXT, "metadata": {"year": 2024}})
    assert put.status_code == 201
    created = put.json()
    assert created["status"] == "created"
    assert created["id"] == "ferry"
    assert created["prefilled_chunks"] == created["num_chunks"] > 0
    assert created["digest"] == text_digest(TEXT).hex()

    again = client.put("/v1/documents/ferry", json={"text": TEXT, "metadata": {"year": 2024}})
    assert (again.status_code, again.json()["status"]) == (200, "unchanged")
    assert again.json()["prefilled_chunks"] == 0
    updated = client.put("/v1/documents/ferry", json={"text": TEXT + " Daily."})
    assert (updated.status_code, updated.json()["status"]) == (200, "updated")
    assert updated.json()["version"] == 2

    got = client.get("/v1/documents/ferry").json()
    assert got["text"] == TEXT + " Daily."
    assert got["metadata"] == {}
    assert got["version"] == 2
    assert got["created_at"] < got["updated_at"]
    assert [c["index"] for c in got["chunks"]] == list(range(len(got["chunks"])))
    spans = [(c["start"], c["end"]) for c in got["chunks"]]
    assert "".join(got["text"][a:b] for a, b in spans) == got["text"]
    assert sum(c["tokens"] for c in got["chunks"]) == got["num_tokens"]

    deleted = client.delete("/v1/documents/ferry")
    assert deleted.json() == {
        "id": "ferry",
        "deleted": True,
        "removed_entries": len(got["chunks"]),
        "unprepared_chunks": 0,
    }
    for response in (client.get("/v1/documents/ferry"), client.delete("/v1/documents/ferry")):
        assert refusal(response) == (404, "document_not_found", "document_id")


def test_a_question_hits_as_soon_as_put_has_answered(client: httpx.Client) -> None:
    client.put("/v1/documents/fresh", json={"text": TEXT})
    body = {"query": "When?", "document_ids": ["fresh"], "max_tokens": 2}
    answer = client.post("/v1/query", json=body).json()
    assert answer["chunkcache"]["documents"][0]["source"] in ("host", "disk")


def test_an_expected_digest_is_checked_before_anything_is_stored(client: httpx.Client) -> None:
    good = text_digest(TEXT).hex().upper()
    assert client.put(url("dig"), json={"text": TEXT, "digest": good}).status_code == 201
    other = client.put(url("dig"), json={"text": TEXT + "!", "digest": good})
    assert refusal(other) == (409, "digest_mismatch", "digest")
    assert client.get(url("dig")).json()["text"] == TEXT
    assert refusal(client.put(url("dig"), json={"text": TEXT, "digest": "ab"})) == (
        400,
        "invalid_value",
        "digest",
    )


def test_line_ends_and_markdown(client: httpx.Client) -> None:
    put = client.put(url("md"), json={"text": "# One\r\nfirst", "format": "markdown"})
    assert put.status_code == 201
    assert client.get(url("md")).json()["text"] == "# One\nfirst"


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "invalid_value", "text"),
        ({"text": 5}, "invalid_value", "text"),
        ({"text": ""}, "empty_document", "text"),
        ({"text": " \n\u200b"}, "empty_document", "text"),
        ({"text": "x", "format": "pdf"}, "invalid_value", "format"),
        ({"text": "x", "metadata": []}, "invalid_value", "metadata"),
        ({"text": "x", "path": "/etc/passwd"}, "unsupported_parameter", "path"),
    ],
)
def test_documents_that_do_not_fit_are_refused(
    client: httpx.Client, body: dict[str, object], code: str, param: str
) -> None:
    assert refusal(client.put(url("bad"), json=body)) == (400, code, param)
    assert client.get(url("bad")).status_code == 404


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"text": "x", "metadata": {"a": [1e999]}}', "metadata"),
        (b'{"text": "x", "metadata": {"a": NaN}}', "metadata"),
        (b'{"text": "a\\ud83d"}', None),
        (b'{"text": "x", "metadata": ' + b'{"a":' * 500 + b"1" + b"}" * 501, None),
    ],
)
def test_json_that_could_not_be_given_back_is_refused(
    client: httpx.Client, body: bytes, param: str | None
) -> None:
    response = client.put(url("bad"), content=body, headers={"content-type": "application/json"})
    assert refusal(response) == (400, "invalid_value", param)
    assert client.get(url("bad")).status_code == 404


def test_metadata_comes_back_as_it_was_given(client: httpx.Client) -> None:
    metadata = {"n": 2**70, "f": 0.1, "s": "č\u2028\x00", "l": [None, True, {"a": {}}], "": -1}
    client.put(url("meta"), json={"text": "x", "metadata": metadata})
    assert client.get(url("meta")).json()["metadata"] == metadata


HOSTILE_IDS = [
    "../../x",
    "/etc/passwd",
    "a/../../b",
    "..",
    "..%2f..%2fx",
    "C:\\x",
    "a//b/",
    "/",
    "?query#fragment",
    "x y+z&a=b;c",
    "100%",
    "Příliš 🙂",
    "<script>",
    "line\nbreak",
    "a" * 2_000,
]


@pytest.mark.parametrize("document_id", HOSTILE_IDS)
def test_any_id_is_only_an_id(client: httpx.Client, runtime: Runtime, document_id: str) -> None:
    """A10: an id comes back as it was given, is one document, and names no file."""
    store = Path(runtime.settings.store)
    files = {str(p) for p in store.parent.rglob("*")} | set(os.listdir("."))
    text = f"Only about {document_id[:10]!r}."
    assert client.put(url(document_id), json={"text": text}).status_code == 201
    got = client.get(url(document_id)).json()
    assert (got["id"], got["text"]) == (document_id, text)
    body = {"query": "q", "document_ids": [document_id], "max_tokens": 1}
    answer = client.post("/v1/query", json=body).json()
    assert answer["citations"][0]["document_id"] == document_id
    assert client.delete(url(document_id)).json()["id"] == document_id
    assert client.get(url(document_id)).status_code == 404
    assert {str(p) for p in store.parent.rglob("*")} | set(os.listdir(".")) == files


@pytest.mark.parametrize("path", ["", "x%00.txt", "%FF", "%C3%28", "%ED%A0%80", "a" * 2_001])
def test_ids_that_cannot_be_kept_are_refused(client: httpx.Client, path: str) -> None:
    """A10: never taken for another id."""
    for response in (
        client.put(f"/v1/documents/{path}", json={"text": "x"}),
        client.get(f"/v1/documents/{path}"),
        client.delete(f"/v1/documents/{path}"),
    ):
        assert refusal(response) == (400, "invalid_value", "document_id")


def test_ids_are_decoded_once(client: httpx.Client) -> None:
    client.put("/v1/documents/one%252Ftwo", json={"text": "encoded"})
    client.put("/v1/documents/one%2Ftwo", json={"text": "slash"})
    assert client.get("/v1/documents/one/two").json()["text"] == "slash"
    assert client.get("/v1/documents/one%252Ftwo").json()["id"] == "one%2Ftwo"


def test_a_listing_has_pages(client: httpx.Client) -> None:
    ids = [f"list/{n}" for n in range(5)]
    for document_id in ids:
        client.put(url(document_id), json={"text": f"Number {document_id}."})
    found: list[str] = []
    after = "list/"
    while len(found) < 5:
        params = {"after": after, "limit": 2}
        page = client.get("/v1/documents", params=params).json()
        assert page["object"] == "list"
        found += [d["id"] for d in page["data"]]
        if not page["has_more"]:
            assert page["next_after"] is None
            break
        assert page["next_after"] == page["data"][-1]["id"]
        after = page["next_after"]
    assert found[:5] == ids
    first = client.get("/v1/documents", params={"limit": 1}).json()["data"][0]
    assert set(first) >= {"id", "version", "digest", "num_tokens", "metadata", "created_at"}
    assert "text" not in first


@pytest.mark.parametrize(
    ("params", "code", "param"),
    [
        ({"limit": 0}, "invalid_value", "limit"),
        ({"limit": 10**6}, "invalid_value", "limit"),
        ({"limit": "x"}, "invalid_value", "limit"),
        ({"limit": ""}, "invalid_value", "limit"),
        ({"page": 2}, "unsupported_parameter", "page"),
    ],
)
def test_listing_parameters_are_checked(
    client: httpx.Client, params: dict[str, str | int], code: str, param: str
) -> None:
    assert refusal(client.get("/v1/documents", params=params)) == (400, code, param)
