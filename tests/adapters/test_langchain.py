"""LangChain: its standard tests, and that documents travel by their ids."""

from typing import Any, Literal

import pytest

pytest.importorskip("langchain_tests")

from langchain_core.documents import Document
from langchain_core.indexing import InMemoryRecordManager, index
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_tests.integration_tests import ChatModelIntegrationTests, RetrieversIntegrationTests
from langchain_tests.integration_tests.indexer import DocumentIndexerTestSuite
from langchain_tests.unit_tests import ChatModelUnitTests
from pydantic import BaseModel

from chunkcache.chunk_cache import ChunkCache
from chunkcache.errors import InvalidValueError, UnsupportedParameterError
from chunkcache.planning import AskOptions
from chunkcache_retriever.adapters.client import CacheClient, ContextPart
from chunkcache_retriever.adapters.langchain.chat_model import ChatChunkCache
from chunkcache_retriever.adapters.langchain.documents import (
    ChunkCacheDocumentIndex,
    ChunkCacheRetriever,
)
from chunkcache_retriever.adapters.langchain.messages import documents_message, read_messages
from chunkcache_retriever.adapters.local_client import LocalClient
from chunkcache_retriever.retriever import Retriever

pytestmark = [
    # LangChain's tests run in loops and servers of their own, and the index is beta there.
    pytest.mark.filterwarnings("ignore::langchain_core._api.beta_decorator.LangChainBetaWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

QUESTION = "Who keeps the key to the tower?"


class _OverCache:
    """Gives LangChain's test classes a cache."""

    client: CacheClient

    @pytest.fixture(autouse=True)
    def _set_client(self, local: LocalClient, passages: dict[str, str]) -> None:
        for name, text in passages.items():
            local.put(name, text)
        type(self).client = local

    @property
    def chat_model_class(self) -> type[ChatChunkCache]:
        return ChatChunkCache

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"client": self.client}


class TestChatModelUnit(_OverCache, ChatModelUnitTests):
    pass


class TestChatModel(_OverCache, ChatModelIntegrationTests):
    @property
    def has_structured_output(self) -> bool:
        """A model of random weights does not end a text on its own."""
        return False

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {"temperature": 0, "max_tokens": 8, "stop": []}


class TestRetriever(_OverCache, RetrieversIntegrationTests):
    @property
    def retriever_constructor(self) -> type[ChunkCacheRetriever]:
        return ChunkCacheRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"client": self.client}

    @property
    def retriever_query_example(self) -> str:
        return "the tower and the bridge and the harbour"


class TestDocumentIndex(DocumentIndexerTestSuite):
    @pytest.fixture
    def index(self, local: LocalClient) -> ChunkCacheDocumentIndex:  # type: ignore[override]
        return ChunkCacheDocumentIndex(client=local)


def test_a_pipeline_answers_as_the_core_call(
    stocked: CacheClient, cache: ChunkCache, local
) -> None:
    retriever = ChunkCacheRetriever(client=stocked, k=5)
    chain = (
        {"documents": retriever, "question": RunnablePassthrough()}
        | RunnableLambda(lambda x: [documents_message(x["question"], x["documents"])])
        | ChatChunkCache(client=stocked, max_tokens=6)
    )
    message = chain.invoke(QUESTION)
    refs = _core_refs(local, cache)
    core = cache.answer(QUESTION, refs, options=AskOptions(max_tokens=6))
    assert message.text == core.text
    told = message.response_metadata
    assert [d["id"] for d in told["chunkcache"]["documents"]] == [r.document_id for r in refs]
    cached = told["token_usage"]["prompt_tokens_details"]["cached_tokens"]
    assert message.usage_metadata["input_token_details"]["cache_read"] == cached > 0
    assert message.usage_metadata["input_tokens"] == core.usage["prompt_tokens"]


def _core_refs(local: LocalClient, cache: ChunkCache) -> Any:
    retriever = local._retriever
    assert isinstance(retriever, Retriever)
    return retriever.retrieve(QUESTION, 5)


def test_ids_of_adding_are_ids_of_finding_and_deleting(client: CacheClient) -> None:
    documents = ChunkCacheDocumentIndex(client=client)
    added = documents.upsert(
        [
            Document(page_content="The crane is green.", metadata={"year": 1902}),
            Document(id="lamp", page_content="The lamp is lit at dusk."),
            Document(id="nothing", page_content="  "),
            Document(id="odd", page_content="The set is odd.", metadata={"set": {1, 2}}),
        ]
    )
    assert added["failed"] == ["nothing", "odd"]
    found = ChunkCacheRetriever(client=client, k=1).invoke("green crane")
    assert [d.id for d in found] == added["succeeded"][:1]
    assert found[0].metadata["year"] == 1902
    assert [d.page_content for d in documents.invoke("lamp dusk", k=1)] == [
        "The lamp is lit at dusk."
    ]
    gone = documents.delete([d.id or "" for d in found])
    assert gone["succeeded"] == added["succeeded"][:1]
    assert documents.get(added["succeeded"]) == documents.get(["lamp"]) != []
    assert list(client.document_ids()) == ["lamp"]


def test_the_indexing_api_writes_and_cleans(client: CacheClient) -> None:
    documents = ChunkCacheDocumentIndex(client=client)
    records = InMemoryRecordManager("test")
    records.create_schema()

    def run(*texts: str) -> dict[str, int]:
        items = [Document(page_content=t, metadata={"source": "a"}) for t in texts]
        return dict(index(items, records, documents, cleanup="full", key_encoder="sha256"))

    assert run("The crane is green.", "The lamp is lit.")["num_added"] == 2
    assert run("The crane is green.", "The lamp is lit.")["num_skipped"] == 2
    assert run("The crane is green.")["num_deleted"] == 1
    assert len(list(client.document_ids())) == 1


def test_messages_carry_documents_by_id() -> None:
    held = {"chunkcache": {"document_id": "a", "chunk_index": 2}}
    message = documents_message(
        "Q",
        [Document(page_content="a passage", metadata=held), "b", Document(page_content="loose")],
    )
    system, turns = read_messages(
        [SystemMessage("S"), HumanMessage("1"), HumanMessage("2"), AIMessage("A"), message]
    )
    assert system == "S"
    assert (turns[0].text, turns[0].reply) == ("1\n\n2", "A")
    assert turns[1].text == "Q"
    assert turns[1].context == (
        ContextPart("a", (2,)),
        ContextPart("b"),
        ContextPart("text-2", text="loose"),
    )
    assert "passage" not in str(message.content)
    openai_form = HumanMessage(
        [{"type": "file", "file": {"file_id": "b"}}, {"type": "text", "text": "Q"}]
    )
    assert read_messages([openai_form])[1][0].context == (ContextPart("b"),)


@pytest.mark.parametrize(
    ("messages", "kind"),
    [
        ([AIMessage("A")], InvalidValueError),
        ([HumanMessage("Q"), AIMessage("A")], InvalidValueError),
        ([], InvalidValueError),
        ([HumanMessage("Q"), ToolMessage("T", tool_call_id="1")], UnsupportedParameterError),
        ([HumanMessage([{"type": "image", "url": "http://x"}])], UnsupportedParameterError),
        (
            [HumanMessage([{"type": "file", "file_id": "a", "extras": {"chunk_indexes": ["0"]}}])],
            InvalidValueError,
        ),
    ],
)
def test_what_messages_cannot_say(messages: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        read_messages(messages)


def test_options_of_a_call_and_unknown_ones(stocked: CacheClient) -> None:
    model = ChatChunkCache(client=stocked, max_tokens=8)
    short = model.invoke("Hello", max_tokens=2)
    assert short.usage_metadata["output_tokens"] <= 2
    with pytest.raises(UnsupportedParameterError, match="tools"):
        model.invoke("Hello", tools=[])
    full = model.invoke([documents_message(QUESTION, ["tower"])], policy="full")
    assert full.response_metadata["chunkcache"]["exact"] is True


class Keeper(BaseModel):
    """Who keeps the key."""

    name: Literal["baker", "smith"]


def test_answers_of_a_schema(stocked: CacheClient) -> None:
    model = ChatChunkCache(client=stocked, max_tokens=60)
    message = [documents_message(QUESTION, ["tower"])]
    assert isinstance(model.with_structured_output(Keeper).invoke(message), Keeper)
    plain = model.with_structured_output(Keeper.model_json_schema(), method="json_schema")
    assert plain.invoke(message)["name"] in ("baker", "smith")
    told = model.with_structured_output(Keeper, include_raw=True).invoke(message)
    assert (told["parsing_error"], told["raw"].type) == (None, "ai")
    assert isinstance(told["parsed"], Keeper)
    short = ChatChunkCache(client=stocked, max_tokens=1).with_structured_output(
        Keeper, include_raw=True
    )
    cut = short.invoke(message)
    assert cut["parsed"] is None
    assert cut["parsing_error"] is not None
    with pytest.raises(UnsupportedParameterError, match="tools"):
        model.with_structured_output(Keeper, tools=[])
