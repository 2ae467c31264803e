"""A LlamaIndex response synthesizer that hands nodes' ids to the model, not their text."""

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.response_synthesizers.base import BaseSynthesizer, QueryTextType
from llama_index.core.schema import NodeWithScore
from llama_index.core.types import RESPONSE_TEXT_TYPE

from chunkcache_retriever.adapters.client import ContextPart
from chunkcache_retriever.adapters.llama_index.llm import ChunkCacheLLM
from chunkcache_retriever.adapters.llama_index.nodes import context_message, node_context


class ChunkCacheSynthesizer(BaseSynthesizer):
    """Answers in one prompt over all nodes; those of the cache stand in it by their ids.

    Nodes from elsewhere stand as texts, which are matched by content. For
    ``RetrieverQueryEngine(retriever, response_synthesizer=...)``.

    Args:
        llm: What answers.
        streaming: Whether responses grow.
        callback_manager: LlamaIndex's.
    """

    def __init__(
        self,
        llm: ChunkCacheLLM,
        streaming: bool = False,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        super().__init__(llm=llm, callback_manager=callback_manager, streaming=streaming)
        self._model = llm

    def synthesize(
        self,
        query: QueryTextType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """The answer to a query over nodes.

        Raises:
            ChunkCacheError: It cannot be answered.
        """
        return super().synthesize(
            query, nodes, additional_source_nodes, context=node_context(nodes), **response_kwargs
        )

    async def asynthesize(
        self,
        query: QueryTextType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """As :meth:`synthesize`."""
        return await super().asynthesize(
            query, nodes, additional_source_nodes, context=node_context(nodes), **response_kwargs
        )

    def get_response(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        context: Sequence[ContextPart] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TEXT_TYPE:
        """The answer over given parts of documents; without any, over texts."""
        message = context_message(query_str, _given(text_chunks, context))
        if self._streaming:
            parts = self._model.stream_chat([message], **response_kwargs)
            return (part.delta or "" for part in parts)
        return self._model.chat([message], **response_kwargs).message.content or ""

    async def aget_response(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        context: Sequence[ContextPart] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TEXT_TYPE:
        """As :meth:`get_response`."""
        message = context_message(query_str, _given(text_chunks, context))
        if self._streaming:
            parts = await self._model.astream_chat([message], **response_kwargs)
            return (part.delta or "" async for part in parts)
        response = await self._model.achat([message], **response_kwargs)
        return response.message.content or ""

    def _get_prompts(self) -> dict[str, Any]:
        return {}

    def _update_prompts(self, prompts_dict: dict[str, Any]) -> None:
        """There are none: the template is the cache's own."""


def _given(
    text_chunks: Sequence[str], context: Sequence[ContextPart] | None
) -> Sequence[ContextPart]:
    if context is not None:
        return context
    return [ContextPart(f"text-{i}", text=text) for i, text in enumerate(text_chunks)]
