"""LangChain's messages and documents as turns, and back.

A document travels in a message as a content block of the type ``file`` with its id, not as text.
Knows no cache.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.messages.ai import UsageMetadata

from chunkcache.errors import InvalidValueError, UnsupportedParameterError
from chunkcache_retriever.adapters.client import ContextPart, Turn
from chunkcache_retriever.adapters.conversation import Said, read_conversation
from chunkcache_retriever.adapters.passages import (
    Place,
    context_of,
    place_of,
    whole_numbers,
)


def documents_message(question: str, documents: Iterable[Document | str]) -> HumanMessage:
    """A question with documents in front of it, by their ids.

    Args:
        question: The question.
        documents: What a ``ChunkCacheRetriever`` found, or ids of stored documents. A document that
            names no place in the store stands as text, and is matched by its content.
    """
    found = [_found(d, i) for i, d in enumerate(documents)]
    blocks: list[str | dict[Any, Any]] = [_block(part) for part in context_of(found)]
    return HumanMessage([*blocks, {"type": "text", "text": question}])


def read_messages(messages: Sequence[BaseMessage]) -> tuple[str | None, list[Turn]]:
    """System prompt and turns of a conversation; messages of one role in a row are joined.

    Raises:
        InvalidValueError: It does not end with a user's message, or begins with an answer.
        UnsupportedParameterError: A message is of another kind than system, human and AI, or holds
            anything but texts and files with an id.
    """
    return read_conversation(_said(m) for m in messages)


def usage_metadata(usage: Mapping[str, Any]) -> UsageMetadata:
    """Token usage under LangChain's names."""
    details = usage["prompt_tokens_details"]
    return UsageMetadata(
        input_tokens=usage["prompt_tokens"],
        output_tokens=usage["completion_tokens"],
        total_tokens=usage["total_tokens"],
        input_token_details={"cache_read": details["cached_tokens"]},
    )


def _found(document: Document | str, index: int) -> Place | ContextPart:
    if isinstance(document, str):
        return ContextPart(document)
    place = place_of(document.metadata)
    if place is not None:
        return place
    return ContextPart(document.id or f"text-{index}", text=document.page_content)


def _block(part: ContextPart) -> dict[str, Any]:
    if part.text is not None:
        return {"type": "text", "text": part.text}
    block: dict[str, Any] = {"type": "file", "file_id": part.document_id}
    if part.chunk_indexes is not None:
        block["extras"] = {"chunk_indexes": list(part.chunk_indexes)}
    return block


def _said(message: BaseMessage) -> Said:
    if isinstance(message, HumanMessage):
        text, context = _human(message)
        return Said("user", text, context)
    if isinstance(message, SystemMessage | AIMessage):
        is_system = isinstance(message, SystemMessage)
        return Said("system" if is_system else "assistant", str(message.text))
    raise UnsupportedParameterError(
        f"messages of the type {message.type!r} are not supported", param="messages"
    )


def _human(message: HumanMessage) -> tuple[str, tuple[ContextPart, ...]]:
    """A message's last text, and what stands before it."""
    if isinstance(message.content, str):
        return message.content, ()
    blocks = [{"type": "text", "text": b} if isinstance(b, str) else b for b in message.content]
    texts = [i for i, block in enumerate(blocks) if block.get("type") == "text"]
    last = texts[-1] if texts else -1
    context = [_part(b, i) for i, b in enumerate(blocks) if i != last]
    return (str(blocks[last]["text"]) if texts else ""), tuple(context)


def _part(block: Mapping[str, Any], index: int) -> ContextPart:
    if block.get("type") == "text":
        return ContextPart(f"text-{index}", text=str(block["text"]))
    file = block.get("file")
    held = file if isinstance(file, Mapping) else block
    file_id = held.get("file_id")
    if block.get("type") != "file" or not isinstance(file_id, str):
        raise UnsupportedParameterError(
            f"content blocks of the type {block.get('type')!r} without a file_id are not supported",
            param="messages",
        )
    extras = block.get("extras")
    indexes = extras.get("chunk_indexes") if isinstance(extras, Mapping) else None
    try:
        return ContextPart(file_id, whole_numbers(indexes))
    except TypeError as error:
        raise InvalidValueError(str(error), param="messages") from error
