"""Clients: one cache gives the same answers, passages and errors in this process and by REST."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import httpx
import pytest

from chunkcache.chunk_cache import ChunkCache
from chunkcache.errors import (
    ChunkCacheError,
    DocumentNotFoundError,
    EmptyDocumentError,
    InvalidValueError,
    RemoteServerError,
    ServerUnreachableError,
    error_of_code,
)
from chunkcache.loose_text import TextRef
from chunkcache.planning import AskOptions, ChatTurn, DocumentRef
from chunkcache_retriever.adapters.client import (
    CacheClient,
    ChatOptions,
    ChatReply,
    ContextPart,
    ModelInfo,
    Turn,
)
from chunkcache_retriever.adapters.passages import Place, context_of
from chunkcache_retriever.adapters.remote_client import RemoteClient

QUESTION = "Who keeps the key to the tower?"
OPTIONS = ChatOptions(max_tokens=6)


@pytest.mark.parametrize("name", ["plain", "a/../b", "../../etc/passwd", "C:\\x", "ä # ?&%2e\n"])
def test_documents_by_ids_of_any_form(client: CacheClient, name: str) -> None:
    text = "The crane is green.\n\nThe lamp is lit at dusk."
    assert client.put(name, text, {"year": 1902, "tags": ["a"]}) == "created"
    assert client.put(name, text, {"year": 1902, "tags": ["a"]}) == "unchanged"
    stored = client.get(name)
    assert stored is not None
    assert (stored.document_id, stored.text) == (name, text)
    assert stored.metadata == {"year": 1902, "tags": ["a"]}
    assert "".join(text[a:b] for a, b in stored.chunks) == text
    assert list(client.document_ids()) == [name]
    assert [p.document_id for p in client.search("crane", 1)] == [name]
    assert client.delete(name)
    assert not client.delete(name)
    assert client.get(name) is None
    assert list(client.document_ids()) == []


def test_passages_say_where_they_stand(stocked: CacheClient, passages: dict[str, str]) -> None:
    hits = stocked.search(QUESTION, 3)
    assert hits[0].document_id == "tower"
    assert all(passages[h.document_id][h.start : h.end] == h.text for h in hits)
    assert hits[0].metadata == {"number": 1}
    only = stocked.search(QUESTION, 3, {"type": "eq", "key": "number", "value": 2})
    assert {h.document_id for h in only} == {"bridge"}


def test_the_answer_is_the_core_calls(stocked: CacheClient, cache: ChunkCache) -> None:
    found = context_of(Place(h.document_id, h.chunk_index) for h in stocked.search(QUESTION, 4))
    refs = [DocumentRef(p.document_id, p.chunk_indexes) for p in found]
    core = cache.answer(QUESTION, refs, options=AskOptions(max_tokens=6))
    reply = stocked.chat([Turn(QUESTION, found)], OPTIONS)
    assert (reply.text, reply.finish_reason) == (core.text, core.finish_reason)
    assert reply.usage["prompt_tokens"] == core.usage["prompt_tokens"]
    details = reply.usage["prompt_tokens_details"]
    assert details["cached_tokens"] + details["recomputed_tokens"] > 0
    assert [d["id"] for d in reply.reuse["documents"]] == [r.document_id for r in refs]
    assert {d["source"] for d in reply.reuse["documents"]} <= {"host", "disk", "device"}


def test_a_message_may_stand_as_it_is(stocked: CacheClient, cache: ChunkCache) -> None:
    turns = [Turn(QUESTION, (ContextPart("tower"),))]
    reply = stocked.chat(turns, replace(OPTIONS, as_question=False))
    core = cache.chat([ChatTurn(QUESTION, ("tower",))], AskOptions(max_tokens=6)).answer()
    assert (reply.text, reply.usage["prompt_tokens"]) == (core.text, core.usage["prompt_tokens"])


def test_an_answer_may_be_json_of_a_schema(stocked: CacheClient) -> None:
    schema = {
        "type": "object",
        "properties": {"keeper": {"enum": ["baker", "smith"]}},
        "required": ["keeper"],
        "additionalProperties": False,
    }
    options = ChatOptions(max_tokens=60, json_schema=schema)
    reply = stocked.chat([Turn(QUESTION, (ContextPart("tower"),))], options)
    assert json.loads(reply.text)["keeper"] in ("baker", "smith")


def test_a_stream_is_the_answer_in_pieces(stocked: CacheClient) -> None:
    turns = [Turn(QUESTION, (ContextPart("tower"), ContextPart("bridge", (0,))))]
    *pieces, last = stocked.stream(turns, replace(OPTIONS, max_tokens=12))
    whole = stocked.chat(turns, replace(OPTIONS, max_tokens=12))
    assert isinstance(last, ChatReply)
    assert "".join(map(str, pieces)) == last.text == whole.text
    assert last.usage["completion_tokens"] == whole.usage["completion_tokens"]


def test_a_stream_that_is_left_ends_its_request(
    stocked: CacheClient,
    cache: ChunkCache,
    wait_until: Callable[[Callable[[], bool]], None],
) -> None:
    stream = stocked.stream([Turn(QUESTION, (ContextPart("tower"),))], ChatOptions(max_tokens=500))
    assert isinstance(stream, Iterator)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    wait_until(lambda: cache.runtime.engine.num_open_requests == 0)


def test_a_conversation_with_texts_and_a_system_prompt(
    stocked: CacheClient, cache: ChunkCache
) -> None:
    turns = [
        Turn("Hello", (ContextPart("note", text="The gate is blue."),), "Good day."),
        Turn(QUESTION, (ContextPart("tower"), ContextPart("x", text="A horse is not a cow."))),
    ]
    reply = stocked.chat(turns, replace(OPTIONS, system="Be brief."))
    core = cache.chat(
        [
            ChatTurn("Hello", (TextRef("note", "The gate is blue."),), "Good day."),
            ChatTurn(QUESTION, ("tower", TextRef("x", "A horse is not a cow."))),
        ],
        AskOptions(system="Be brief.", max_tokens=6),
    ).answer()
    assert reply.text == core.text
    assert reply.usage["prompt_tokens"] == core.usage["prompt_tokens"]
    assert reply.reuse["documents"][0]["id"] == "note"


@pytest.mark.parametrize(
    ("turn", "options", "kind"),
    [
        (Turn("Q", (ContextPart("nowhere"),)), OPTIONS, DocumentNotFoundError),
        (Turn("Q", (ContextPart("tower", (99,)),)), OPTIONS, InvalidValueError),
        (Turn("Q", (ContextPart("tower"),)), replace(OPTIONS, policy="best"), InvalidValueError),
        (Turn("Q"), replace(OPTIONS, temperature=-1.0), InvalidValueError),
        (Turn("Q"), replace(OPTIONS, max_tokens=10**9), InvalidValueError),
    ],
)
def test_errors_are_the_same_errors(
    stocked: CacheClient, turn: Turn, options: ChatOptions, kind: type[ChunkCacheError]
) -> None:
    with pytest.raises(kind) as plain:
        stocked.chat([turn], options)
    with pytest.raises(kind) as streamed:
        list(stocked.stream([turn], options))
    assert plain.value.code == streamed.value.code == kind.code


@pytest.mark.parametrize("value", [{1, 2}, float("nan"), b"x"])
def test_metadata_that_are_no_json_are_refused(client: CacheClient, value: object) -> None:
    with pytest.raises(InvalidValueError, match="JSON"):
        client.put("a", "A lamp.", {"value": value})  # type: ignore[dict-item]
    with pytest.raises(InvalidValueError, match="Unicode"):
        client.put("a", "A \ud800 lamp.")


def test_empty_documents_are_refused(client: CacheClient) -> None:
    with pytest.raises(EmptyDocumentError):
        client.put("nothing", " \n\u200b")


def test_a_text_has_no_chunks_of_a_document() -> None:
    with pytest.raises(InvalidValueError):
        ContextPart("a", (0,), "text")


def test_a_server_that_is_not_there_says_so() -> None:
    with RemoteClient("http://127.0.0.1:9") as nobody:
        with pytest.raises(ServerUnreachableError, match="cannot be reached"):
            nobody.get("a")
        with pytest.raises(ServerUnreachableError):
            list(nobody.stream([Turn("Q")], OPTIONS))


def test_codes_that_have_no_error_here_are_told(remote: RemoteClient) -> None:
    remote._model = ModelInfo("another", 1)
    with pytest.raises(RemoteServerError, match="model_not_found") as told:
        remote.chat([Turn("Q")], OPTIONS)
    assert told.value.remote_code == "model_not_found"


def test_an_answer_that_is_none_of_a_chunkcache_server(remote: RemoteClient) -> None:
    pages = {"/v1/documents/a": "<html>", "/v1/documents/b": "null"}
    remote._http = httpx.Client(
        base_url="http://x",
        transport=httpx.MockTransport(lambda r: httpx.Response(500, text=pages[r.url.path])),
    )
    for name in "ab":
        with pytest.raises(RemoteServerError, match="500"):
            remote.get(name)


def test_codes_name_one_error() -> None:
    assert error_of_code("document_not_found") is DocumentNotFoundError
    assert error_of_code("no_such_code") is None


def test_passages_of_one_document_stand_together() -> None:
    loose = ContextPart("n", text="t")
    found = [Place("a", 2), Place("b", 0), loose, Place("a", 0), Place("a", 2)]
    assert context_of(found) == (ContextPart("a", (0, 2)), ContextPart("b", (0,)), loose)
