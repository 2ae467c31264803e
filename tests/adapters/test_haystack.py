"""Haystack: its document stores' tests, and that documents travel by their ids."""

from typing import Any

import pytest

pytest.importorskip("haystack")

from haystack import Document, Pipeline
from haystack.components.writers import DocumentWriter
from haystack.dataclasses import ChatMessage, StreamingChunk
from haystack.document_stores.types import DuplicatePolicy
from haystack.errors import FilterError
from haystack.testing.document_store import DocumentStoreBaseTests

from chunkcache.chunk_cache import ChunkCache
from chunkcache.errors import InvalidValueError, UnsupportedParameterError
from chunkcache.planning import AskOptions
from chunkcache_retriever.adapters.client import CacheClient
from chunkcache_retriever.adapters.haystack.chat_generator import (
    ChunkCacheChatGenerator,
    documents_message,
)
from chunkcache_retriever.adapters.haystack.document_store import (
    ChunkCacheDocumentStore,
    ChunkCacheRetriever,
)
from chunkcache_retriever.adapters.haystack.filters import translated
from chunkcache_retriever.adapters.local_client import LocalClient
from chunkcache_retriever.adapters.remote_client import RemoteClient
from chunkcache_retriever.metadata_filter import parse_filter
from chunkcache_retriever.retriever import Retriever

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

QUESTION = "Who keeps the key to the tower?"


class TestDocumentStore(DocumentStoreBaseTests):
    @pytest.fixture
    def document_store(self, local: LocalClient) -> ChunkCacheDocumentStore:
        return ChunkCacheDocumentStore(local)

    @staticmethod
    def assert_documents_are_equal(received: list[Document], expected: list[Document]) -> None:
        """In order of ids, and without embeddings, which the cache makes itself."""

        def shown(documents: list[Document]) -> list[tuple[str, str | None, dict[str, Any]]]:
            return sorted((d.id, d.content, d.meta) for d in documents)

        assert shown(received) == shown(expected)

    def test_write_documents(self, document_store: ChunkCacheDocumentStore) -> None:
        document = Document(id="1", content="one")
        assert document_store.write_documents([document]) == 1
        assert document_store.write_documents([Document(id="1", content="other")]) == 1
        assert [d.content for d in document_store.filter_documents()] == ["other"]


def test_a_pipeline_answers_as_the_core_call(
    stocked: CacheClient, cache: ChunkCache, local: LocalClient
) -> None:
    pipeline = Pipeline()
    pipeline.add_component(
        "retriever", ChunkCacheRetriever(ChunkCacheDocumentStore(stocked), top_k=5)
    )
    pipeline.add_component("llm", ChunkCacheChatGenerator(stocked, {"max_tokens": 6}))
    pipeline.connect("retriever.documents", "llm.documents")
    messages = [ChatMessage.from_user(QUESTION)]
    data = {"retriever": {"query": QUESTION}, "llm": {"messages": messages}}
    (reply,) = pipeline.run(data)["llm"]["replies"]
    retriever = local._retriever
    assert isinstance(retriever, Retriever)
    refs = retriever.retrieve(QUESTION, 5)
    core = cache.answer(QUESTION, refs, options=AskOptions(max_tokens=6))
    assert reply.text == core.text
    assert [d["id"] for d in reply.meta["chunkcache"]["documents"]] == [r.document_id for r in refs]
    assert reply.meta["usage"]["prompt_tokens"] == core.usage["prompt_tokens"]
    assert reply.meta["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_ids_of_writing_are_ids_of_finding_and_deleting(client: CacheClient) -> None:
    store = ChunkCacheDocumentStore(client)
    documents = [
        Document(content="The crane is green.", meta={"year": 1902}),
        Document(content="The lamp is lit at dusk.", meta={"year": 1950}),
    ]
    writer = DocumentWriter(store, policy=DuplicatePolicy.SKIP)
    assert writer.run(documents)["documents_written"] == 2
    assert writer.run(documents)["documents_written"] == 0
    retriever = ChunkCacheRetriever(store, top_k=1)
    (found,) = retriever.run("green crane")["documents"]
    assert found.meta["source_id"] == documents[0].id
    newer = {"field": "meta.year", "operator": ">", "value": 1910}
    (other,) = retriever.run("green crane", filters=newer)["documents"]
    assert other.meta["source_id"] == documents[1].id
    store.delete_documents([found.meta["source_id"]])
    assert [d.id for d in store.filter_documents()] == [documents[1].id]


def test_a_stream_and_a_message_with_documents(stocked: CacheClient) -> None:
    generator = ChunkCacheChatGenerator(stocked, {"max_tokens": 6})
    message = documents_message(QUESTION, ["tower", "bridge"])
    (whole,) = generator.run([message])["replies"]
    pieces: list[StreamingChunk] = []
    (streamed,) = generator.run([message], streaming_callback=pieces.append)["replies"]
    assert streamed.text == whole.text == "".join(p.content for p in pieces)
    read_back = ChatMessage.from_dict(message.to_dict())
    assert generator.run([read_back])["replies"][0].text == whole.text
    assert [d["id"] for d in whole.meta["chunkcache"]["documents"]] == ["tower", "bridge"]


def test_documents_from_elsewhere_stand_as_texts(
    stocked: CacheClient, passages: dict[str, str]
) -> None:
    generator = ChunkCacheChatGenerator(stocked, {"max_tokens": 4, "on_miss": "error"})
    whole = [Document(id="tower", content=passages["tower"])]
    (reply,) = generator.run([ChatMessage.from_user(QUESTION)], documents=whole)["replies"]
    (told,) = reply.meta["chunkcache"]["documents"]
    assert told["source"] in ("host", "disk", "device")  # found by its content


def test_pipelines_name_servers_and_no_keys() -> None:
    with RemoteClient("http://localhost:9/v1", "ck_secret") as client:
        store = ChunkCacheDocumentStore(client)
        parts = [
            store,
            ChunkCacheRetriever(store, 3),
            ChunkCacheChatGenerator(client, {"max_tokens": 2}),
        ]
        for part in parts:
            written = part.to_dict()
            assert "ck_secret" not in str(written)
            assert type(part).from_dict(written).to_dict() == written
    with pytest.raises(InvalidValueError, match="base_url"):
        ChunkCacheDocumentStore.from_dict({"type": "x", "init_parameters": {}})


def test_a_cache_of_this_process_is_not_serialised(local: LocalClient) -> None:
    with pytest.raises(InvalidValueError, match="cannot be serialised"):
        ChunkCacheDocumentStore(local).to_dict()


def condition(operator: str, value: Any, field: str = "meta.n") -> dict[str, Any]:
    return {"field": field, "operator": operator, "value": value}


def group(operator: str, *conditions: dict[str, Any]) -> dict[str, Any]:
    return {"operator": operator, "conditions": list(conditions)}


@pytest.mark.parametrize(
    ("filters", "holds"),
    [
        (condition("==", 2), {2}),
        (condition("!=", 2), {1, 3}),
        (condition("not in", [1, 2]), {3}),
        (group("AND", condition(">=", 2), condition("<", 3)), {2}),
        (group("OR", condition("==", 1), condition(">", 2)), {1, 3}),
        (group("NOT", condition("==", 1)), {2, 3}),
        (group("NOT", condition("!=", 1), condition("in", [1, 2])), {1, 3}),
        (group("NOT", group("OR", condition("==", 1), condition("==", 2))), {3}),
        (group("NOT", group("NOT", condition(">", 1))), {2, 3}),
        (condition("==", 3, "n"), {3}),
    ],
)
def test_filters_mean_what_they_mean_in_haystack(filters: dict[str, Any], holds: set[int]) -> None:
    parsed = parse_filter(translated(filters))
    assert {n for n in (1, 2, 3) if parsed.matches({"n": n})} == holds


@pytest.mark.parametrize(
    "filters",
    [
        {},
        group("XOR", condition("==", 1)),
        group("AND"),
        condition("~", 1),
        condition("==", 1, "content"),
        group("NOT", condition(">", 1)),
        {"field": "meta.n", "operator": "=="},
    ],
)
def test_filters_that_cannot_be_searched_by(filters: dict[str, Any]) -> None:
    with pytest.raises(FilterError):
        translated(filters)


def test_what_cannot_be_said(stocked: CacheClient) -> None:
    generator = ChunkCacheChatGenerator(stocked)
    with pytest.raises(UnsupportedParameterError, match="tools"):
        generator.run([ChatMessage.from_user("Q")], generation_kwargs={"tools": []})
    with pytest.raises(UnsupportedParameterError):
        generator.run([ChatMessage.from_tool("T", origin=None)])  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError):
        generator.run([])
    with pytest.raises(InvalidValueError, match="no text"):
        ChunkCacheDocumentStore(stocked).write_documents([Document(content=None)])
