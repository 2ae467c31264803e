"""LlamaIndex: model, retriever, node parser and synthesizer; documents travel by their ids."""

import asyncio
from typing import Any

import pytest

pytest.importorskip("llama_index.core")

from llama_index.core import Document, Settings
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, MessageRole
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode

from chunkcache.chunk_cache import ChunkCache
from chunkcache.errors import DocumentNotFoundError, InvalidValueError, UnsupportedParameterError
from chunkcache.planning import AskOptions
from chunkcache_retriever.adapters.client import CacheClient, ContextPart
from chunkcache_retriever.adapters.llama_index.llm import ChunkCacheLLM
from chunkcache_retriever.adapters.llama_index.nodes import documents_message, read_messages
from chunkcache_retriever.adapters.llama_index.retriever import (
    ChunkCacheNodeParser,
    ChunkCacheRetriever,
)
from chunkcache_retriever.adapters.llama_index.synthesizer import ChunkCacheSynthesizer
from chunkcache_retriever.adapters.local_client import LocalClient
from chunkcache_retriever.retriever import Retriever

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

QUESTION = "Who keeps the key to the tower?"


@pytest.fixture(autouse=True)
def plain_tokenizer() -> Any:
    """LlamaIndex's own tokenizer would be downloaded."""
    Settings.tokenizer = str.split
    yield
    Settings.tokenizer = None  # type: ignore[assignment]


def test_a_query_engine_answers_as_the_core_call(
    stocked: CacheClient, cache: ChunkCache, local: LocalClient
) -> None:
    llm = ChunkCacheLLM(client=stocked, max_tokens=6)
    counter = TokenCountingHandler(tokenizer=str.split)
    callbacks = CallbackManager([counter])
    engine = RetrieverQueryEngine(
        ChunkCacheRetriever(stocked, similarity_top_k=5),
        response_synthesizer=ChunkCacheSynthesizer(llm, callback_manager=callbacks),
    )
    response = engine.query(QUESTION)
    retriever = local._retriever
    assert isinstance(retriever, Retriever)
    refs = retriever.retrieve(QUESTION, 5)
    core = cache.answer(QUESTION, refs, options=AskOptions(max_tokens=6))
    assert str(response) == core.text
    assert {n.node.ref_doc_id for n in response.source_nodes} == {r.document_id for r in refs}
    assert counter.prompt_llm_token_count == core.usage["prompt_tokens"]
    assert counter.completion_llm_token_count == core.usage["completion_tokens"]


def test_streams_and_loops_give_the_same_answer(stocked: CacheClient) -> None:
    llm = ChunkCacheLLM(client=stocked, max_tokens=6)
    nodes = ChunkCacheRetriever(stocked).retrieve(QUESTION)
    whole = llm.chat([documents_message(QUESTION, nodes)])
    growing = list(llm.stream_chat([documents_message(QUESTION, nodes)]))
    assert "".join(r.delta or "" for r in growing) == whole.message.content
    assert growing[-1].raw["usage"]["prompt_tokens"] == whole.raw["usage"]["prompt_tokens"]
    streaming = ChunkCacheSynthesizer(llm, streaming=True).synthesize(QUESTION, nodes)
    assert "".join(streaming.response_gen) == whole.message.content

    async def on_a_loop() -> list[str | None]:
        chat = await llm.achat([documents_message(QUESTION, nodes)])
        stream = await llm.astream_chat([documents_message(QUESTION, nodes)])
        streamed = "".join([r.delta or "" async for r in stream])
        response = await ChunkCacheSynthesizer(llm).asynthesize(QUESTION, nodes)
        return [chat.message.content, streamed, str(response)]

    assert asyncio.run(on_a_loop()) == [whole.message.content] * 3


def test_completions(stocked: CacheClient) -> None:
    llm = ChunkCacheLLM(client=stocked, max_tokens=4)
    whole = llm.complete("Hello")
    assert "".join(r.delta or "" for r in llm.stream_complete("Hello")) == whole.text
    assert whole.raw["usage"]["completion_tokens"] <= 4
    assert (llm.metadata.is_chat_model, llm.metadata.model_name) == (
        True,
        stocked.model().name,
    )
    assert asyncio.run(llm.acomplete("Hello")).text == whole.text
    assert "client" not in llm.to_dict()


def test_nodes_are_the_chunks_that_are_cached(client: CacheClient) -> None:
    text = "The gate is blue. " * 30 + "The gate is blue."
    parser = ChunkCacheNodeParser(client=client)
    nodes = parser.get_nodes_from_documents([Document(id_="gate", text=text, metadata={"n": 1})])
    stored = client.get("gate")
    assert stored is not None
    assert len(nodes) > 2
    assert [(n.start_char_idx, n.end_char_idx) for n in nodes] == list(stored.chunks)
    assert all(text[n.start_char_idx : n.end_char_idx] == n.text for n in nodes)
    assert {n.ref_doc_id for n in nodes} == {"gate"}
    assert len({n.node_id for n in nodes}) == len(nodes)
    assert "chunk_index" not in nodes[0].get_content(metadata_mode=MetadataMode.LLM)
    assert nodes[1].prev_node.node_id == nodes[0].node_id
    llm = ChunkCacheLLM(client=client, max_tokens=2)
    response = llm.chat([documents_message("Which colour?", nodes[1:3])], on_miss="error")
    (told,) = response.raw["chunkcache"]["documents"]
    assert (told["id"], told["chunks"]) == ("gate", 2)
    assert client.delete(nodes[0].ref_doc_id)
    with pytest.raises(DocumentNotFoundError):
        llm.chat([documents_message("Which colour?", nodes[1:3])])


def test_nodes_from_elsewhere_stand_as_texts() -> None:
    message = documents_message("Q", [NodeWithScore(node=TextNode(id_="n", text="loose")), "b"])
    _, turns = read_messages([message])
    assert turns[0].context == (ContextPart("n", text="loose"), ContextPart("b"))
    assert message.content == "Q"


@pytest.mark.parametrize(
    ("messages", "kind"),
    [
        ([], InvalidValueError),
        ([ChatMessage("A", role=MessageRole.ASSISTANT)], InvalidValueError),
        ([ChatMessage("T", role=MessageRole.TOOL)], UnsupportedParameterError),
        ([ChatMessage([ImageBlock(url="http://x/y.png")])], UnsupportedParameterError),
        ([ChatMessage("Q", additional_kwargs={"chunkcache_context": [1]})], InvalidValueError),
    ],
)
def test_what_messages_cannot_say(messages: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        read_messages(messages)


def test_without_nodes_there_is_no_question(stocked: CacheClient) -> None:
    llm = ChunkCacheLLM(client=stocked, max_tokens=2)
    assert str(ChunkCacheSynthesizer(llm).synthesize(QUESTION, [])) == "Empty Response"
    with pytest.raises(UnsupportedParameterError, match="tools"):
        llm.chat([ChatMessage("Q")], tools=[])
