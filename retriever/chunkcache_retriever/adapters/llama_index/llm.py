"""A LlamaIndex model over a cache."""

import asyncio
from collections.abc import AsyncGenerator, Generator, Sequence
from typing import Any, TypeVar

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.bridge.pydantic import Field
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.custom import CustomLLM

from chunkcache.errors import UnsupportedParameterError
from chunkcache_retriever.adapters.client import (
    CALL_OPTIONS,
    CacheClient,
    ChatOptions,
    ChatReply,
    OnMiss,
)
from chunkcache_retriever.adapters.llama_index.nodes import read_messages

PartT = TypeVar("PartT")


class ChunkCacheLLM(CustomLLM):
    """Answers over documents whose keys and values are cached.

    Documents stand in a message by their ids: see
    :func:`~chunkcache_retriever.adapters.llama_index.nodes.documents_message`. A response's ``raw``
    holds ``usage``, which LlamaIndex's token counter reads, and the block ``chunkcache``. The
    options of a call may also be given to each call. The asynchronous methods wait on a
    thread.
    """

    client: CacheClient = Field(exclude=True, description="The cache that is asked.")
    max_tokens: int = Field(default=256, description="Largest number of answer tokens.")
    temperature: float = Field(default=0.0, description="0 is greedy.")
    top_p: float = Field(default=1.0, description="Keep the likeliest tokens up to this sum.")
    seed: int = Field(default=0, description="Seed of the draws.")
    policy: str | None = Field(default=None, description="Recompute policy.")
    recompute_ratio: float | None = Field(
        default=None, description="Share of the chunk tokens that run again."
    )
    on_miss: OnMiss = Field(default="prefill", description="What to do about a missing chunk.")
    json_schema: dict[str, Any] | None = Field(
        default=None, description="Answers are JSON of this schema."
    )
    as_question: bool = Field(
        default=True, description="Put a single message with documents as a question is put."
    )

    @classmethod
    def class_name(cls) -> str:
        """The class's name in serialised form."""
        return "ChunkCacheLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """What the model can take."""
        model = self.client.model()
        return LLMMetadata(
            context_window=model.max_positions,
            num_output=self.max_tokens,
            is_chat_model=True,
            model_name=model.name,
        )

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """The answer to a conversation.

        Raises:
            ChunkCacheError: It cannot be answered.
        """
        system, turns = read_messages(messages)
        reply = self.client.chat(turns, self._options(system, kwargs))
        return ChatResponse(message=_message(reply.text), raw=_raw(reply))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """The answer as it grows; the last response holds the usage. Errors as in :meth:`chat`."""
        system, turns = read_messages(messages)
        options = self._options(system, kwargs)

        def responses() -> ChatResponseGen:
            text = ""
            for piece in self.client.stream(turns, options):
                if isinstance(piece, ChatReply):
                    yield ChatResponse(message=_message(text), delta="", raw=_raw(piece))
                    return
                text += piece
                yield ChatResponse(message=_message(text), delta=piece)

        return responses()

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """The answer to one message. Errors as in :meth:`chat`."""
        response = self.chat([ChatMessage(prompt, role=MessageRole.USER)], **kwargs)
        return CompletionResponse(text=response.message.content or "", raw=response.raw)

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        """The same as it grows. Errors as in :meth:`chat`."""
        growing = self.stream_chat([ChatMessage(prompt, role=MessageRole.USER)], **kwargs)

        def responses() -> CompletionResponseGen:
            for part in growing:
                yield CompletionResponse(
                    text=part.message.content or "", delta=part.delta, raw=part.raw
                )

        return responses()

    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """As :meth:`chat`."""
        return await asyncio.to_thread(self.chat, messages, **kwargs)

    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        """As :meth:`stream_chat`."""
        return _on_threads(await asyncio.to_thread(self.stream_chat, messages, **kwargs))

    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        """As :meth:`complete`."""
        return await asyncio.to_thread(self.complete, prompt, formatted, **kwargs)

    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """As :meth:`stream_complete`."""
        growing = await asyncio.to_thread(self.stream_complete, prompt, formatted, **kwargs)
        return _on_threads(growing)

    def _options(self, system: str | None, given: dict[str, Any]) -> ChatOptions:
        stops = tuple(given.pop("stop", None) or ())
        if unknown := sorted(given.keys() - set(CALL_OPTIONS)):
            raise UnsupportedParameterError(f"{unknown[0]} is not implemented", param=unknown[0])
        own = {name: given.get(name, getattr(self, name)) for name in CALL_OPTIONS}
        return ChatOptions(system=system, stop=stops, **own)


async def _on_threads(parts: Generator[PartT, None, None]) -> AsyncGenerator[PartT, None]:
    """What a generator gives, each part waited for on a thread; leaving early closes it."""
    try:
        while (part := await asyncio.to_thread(next, parts, None)) is not None:
            yield part
    finally:
        parts.close()


def _message(text: str) -> ChatMessage:
    return ChatMessage(text, role=MessageRole.ASSISTANT)


def _raw(reply: ChatReply) -> dict[str, Any]:
    return {
        "id": reply.id,
        "model": reply.model,
        "finish_reason": reply.finish_reason,
        "usage": dict(reply.usage),
        "chunkcache": dict(reply.reuse),
    }
