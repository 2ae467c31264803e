"""``/v1/cache/pins``: keep, expect, let go, refuse."""

import httpx

TEXT = "The harbour opens at seven.\n\nThe ferry leaves from the northern pier at nine."


def test_documents_are_pinned_and_let_go(client: httpx.Client) -> None:
    client.put("/v1/documents/ferry", json={"text": TEXT})
    pinned = client.post("/v1/cache/pins", json={"document_ids": ["ferry"], "ttl_s": 600})
    assert pinned.status_code == 200
    body = pinned.json()
    assert (body["object"], body["ttl_s"]) == ("chunkcache.pins", 600)
    assert body["chunks"] > 0
    assert body["bytes"] > 0
    expected = client.post("/v1/cache/pins", json={"document_ids": ["ferry"], "next_use_s": 5})
    assert expected.json()["chunks"] == body["chunks"]
    ended = client.request("DELETE", "/v1/cache/pins", json={"document_ids": ["ferry"]})
    assert ended.json() == {"object": "chunkcache.pins", "unpinned_chunks": body["chunks"]}


def test_pins_are_checked(client: httpx.Client) -> None:
    client.put("/v1/documents/ferry", json={"text": TEXT})
    for body, status, code in (
        ({"document_ids": ["none"], "ttl_s": 1}, 404, "document_not_found"),
        ({"document_ids": ["ferry"]}, 400, "invalid_value"),
        ({"document_ids": ["ferry"], "ttl_s": 1, "next_use_s": 1}, 400, "invalid_value"),
        ({"document_ids": ["ferry"], "ttl_s": 0}, 400, "invalid_value"),
        ({"document_ids": [], "ttl_s": 1}, 400, "invalid_value"),
    ):
        response = client.post("/v1/cache/pins", json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (status, code), body
