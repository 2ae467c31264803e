"""A Haystack chat generator over a cache."""

from collections.abc import Iterable
from typing import Any

from haystack import Document, component, default_from_dict, default_to_dict
from haystack.dataclasses import ChatMessage, ChatRole, StreamingChunk
from haystack.dataclasses.streaming_chunk import SyncStreamingCallbackT

from chunkcache.errors import InvalidValueError, UnsupportedParameterError
from chunkcache_retriever.adapters.client import (
    CALL_OPTIONS,
    CacheClient,
    ChatOptions,
    ChatReply,
    ContextPart,
)
from chunkcache_retriever.adapters.conversation import Said, read_conversation
from chunkcache_retriever.adapters.haystack.serialisation import client_from_dict, client_to_dict
from chunkcache_retriever.adapters.passages import (
    CONTEXT_KEY,
    Place,
    context_fields,
    context_of,
    place_of,
    read_context,
)

_GENERATION_OPTIONS = frozenset((*CALL_OPTIONS, "stop"))


def documents_message(question: str, documents: Iterable[Document | str]) -> ChatMessage:
    """A question with documents in front of it, by their ids.

    Args:
        question: The question.
        documents: What a retriever found, or ids of stored documents. A document that names no
            place in the store stands as text, and is matched by its content.
    """
    fields = context_fields(_context(documents))
    return ChatMessage.from_user(question, meta={CONTEXT_KEY: fields})


@component
class ChunkCacheChatGenerator:
    """Answers over documents whose keys and values are cached.

    A reply's ``meta`` has ``usage`` under OpenAI's names, and the service's block ``chunkcache``.

    Args:
        client: The cache that is asked.
        generation_kwargs: ``max_tokens``, ``temperature``, ``top_p``, ``seed``, ``stop``, ``policy``,
            ``recompute_ratio``, ``on_miss``, ``json_schema``, ``as_question``.
        streaming_callback: Called with each piece of an answer.
    """

    def __init__(
        self,
        client: CacheClient,
        generation_kwargs: dict[str, Any] | None = None,
        streaming_callback: SyncStreamingCallbackT | None = None,
    ) -> None:
        self.client = client
        self.generation_kwargs = generation_kwargs or {}
        self.streaming_callback = streaming_callback

    def to_dict(self) -> dict[str, Any]:
        """The component in a serialised pipeline.

        Raises:
            InvalidValueError: Its cache is of this process, or it has a callback.
        """
        if self.streaming_callback is not None:
            raise InvalidValueError(
                "give the streaming_callback to run: it is not serialised",
                param="streaming_callback",
            )
        return default_to_dict(
            self, client=client_to_dict(self.client), generation_kwargs=self.generation_kwargs
        )

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "ChunkCacheChatGenerator":
        """The component that :meth:`to_dict` wrote."""
        parameters = dict(data.get("init_parameters", {}))
        parameters["client"] = client_from_dict(parameters.get("client"))
        return default_from_dict(cls, data | {"init_parameters": parameters})

    @component.output_types(replies=list[ChatMessage])
    def run(
        self,
        messages: list[ChatMessage],
        documents: list[Document] | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        streaming_callback: SyncStreamingCallbackT | None = None,
    ) -> dict[str, list[ChatMessage]]:
        """The answer to a conversation.

        Args:
            messages: It; a user's message last.
            documents: What stands in front of the last message, by ids where they have one.
            generation_kwargs: Replace those of the component one by one.
            streaming_callback: Replaces the component's.

        Raises:
            ChunkCacheError: It cannot be answered.
        """
        said = [_said(m) for m in messages]
        if said and documents:
            last = said[-1]
            context = (*last.context, *_context(documents))
            said[-1] = Said(last.role, last.text, context)
        system, turns = read_conversation(said)
        options = self._options(system, generation_kwargs or {})
        callback = streaming_callback or self.streaming_callback
        if callback is None:
            return {"replies": [_reply(self.client.chat(turns, options))]}
        replies = []
        for piece in self.client.stream(turns, options):
            if isinstance(piece, ChatReply):
                replies.append(_reply(piece))
            else:
                callback(StreamingChunk(content=piece))
        return {"replies": replies}

    def _options(self, system: str | None, given: dict[str, Any]) -> ChatOptions:
        wanted = {**self.generation_kwargs, **given}
        if unknown := sorted(wanted.keys() - _GENERATION_OPTIONS):
            raise UnsupportedParameterError(f"{unknown[0]} is not implemented", param=unknown[0])
        if "stop" in wanted:
            wanted["stop"] = tuple(wanted["stop"])
        return ChatOptions(system=system, **wanted)


def _context(documents: Iterable[Document | str]) -> tuple[ContextPart, ...]:
    return context_of(_found(d) for d in documents)


def _found(document: Document | str) -> Place | ContextPart:
    if isinstance(document, str):
        return ContextPart(document)
    place = place_of(document.meta)
    return ContextPart(document.id, text=document.content or "") if place is None else place


def _said(message: ChatMessage) -> Said:
    roles = {ChatRole.USER: "user", ChatRole.SYSTEM: "system", ChatRole.ASSISTANT: "assistant"}
    role = roles.get(message.role)
    others = (*message.tool_calls, *message.images, *message.files)
    if role is None or others or message.text is None:
        raise UnsupportedParameterError(
            "messages are texts of a system, users and assistants", param="messages"
        )
    if role != "user":
        return Said("system" if role == "system" else "assistant", message.text)
    return Said("user", message.text, read_context(message.meta.get(CONTEXT_KEY, ())))


def _reply(reply: ChatReply) -> ChatMessage:
    return ChatMessage.from_assistant(
        reply.text,
        meta={
            "id": reply.id,
            "model": reply.model,
            "index": 0,
            "finish_reason": reply.finish_reason,
            "usage": dict(reply.usage),
            "chunkcache": dict(reply.reuse),
        },
    )
