"""OpenAI's messages as turns: which text is a document, which the message, which a reply."""

from collections.abc import Sequence
from typing import Final

from chunkcache.errors import InvalidValueError
from chunkcache.loose_text import TextRef
from chunkcache.planning import ChatTurn, ContextRef, DocumentRef
from chunkcache_api.schemas.chat import GivenDocument, Message

SYSTEM_ROLES: Final = ("system", "developer")


def system_text(messages: Sequence[Message]) -> str | None:
    """The system message's text, where the conversation begins with one."""
    return joined_text(messages[0]) if num_system_messages(messages) else None


def num_system_messages(messages: Sequence[Message]) -> int:
    """How many system messages a conversation begins with, of which it may have one."""
    return int(messages[0].role in SYSTEM_ROLES)


def chat_turns(
    messages: Sequence[Message],
    documents: Sequence[GivenDocument],
    *,
    first: int,
    name: str = "messages",
) -> list[ChatTurn]:
    """The messages behind the system message.

    Args:
        messages: As they came.
        documents: What stands in front of the first message.
        first: Where that is: how many system messages stand before it.
        name: What the request calls its messages.

    Raises:
        InvalidValueError: Users and assistants do not take turns, a user last.
    """
    for index, message in enumerate(messages[first:], first):
        wanted = "user" if (index - first) % 2 == 0 else "assistant"
        if message.role != wanted:
            raise InvalidValueError(
                f"a message of the role {message.role!r} where one of the role {wanted!r} is due: "
                "behind an optional system message users and assistants take turns",
                param=f"{name}[{index}].role",
            )
    if len(messages) == first or messages[-1].role != "user":
        raise InvalidValueError(
            "the last message is not a user's", param=f"{name}[{len(messages) - 1}].role"
        )
    turns = []
    for index in range(first, len(messages), 2):
        context = [_given(d, i) for i, d in enumerate(documents)] if index == first else []
        text, parts = _parts(messages[index], f"{name}[{index}]")
        reply = joined_text(messages[index + 1]) if index + 1 < len(messages) else None
        turns.append(ChatTurn(text, (*context, *parts), reply))
    return turns


def _given(document: GivenDocument, index: int) -> ContextRef:
    if document.text is None:
        return _stored(document.id, document.chunk_indexes)
    return TextRef(document.id, document.text, f"documents[{index}].text")


def _stored(document_id: str, chunk_indexes: Sequence[int] | None) -> DocumentRef:
    return DocumentRef(document_id, None if chunk_indexes is None else tuple(chunk_indexes))


def _parts(message: Message, param: str) -> tuple[str, list[ContextRef]]:
    """A user's message: its last text, and everything else as documents."""
    last = max((i for i, p in enumerate(message.content) if p.text is not None), default=-1)
    context: list[ContextRef] = []
    for index, part in enumerate(message.content):
        at = f"{param}.content[{index}]"
        if part.file is not None:
            assert part.file.file_id is not None
            context.append(_stored(part.file.file_id, part.file.chunk_indexes))
        elif index != last:
            assert part.text is not None
            context.append(TextRef(at, part.text, f"{at}.text"))
    return (message.content[last].text or "" if last >= 0 else ""), context


def joined_text(message: Message) -> str:
    """A message's text parts, a line each."""
    return "\n".join(part.text or "" for part in message.content)
