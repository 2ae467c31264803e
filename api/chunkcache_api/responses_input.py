"""The input of ``POST /v1/responses`` as chat messages, in the same order and number."""

from collections.abc import Sequence
from itertools import takewhile

from chunkcache.planning import ChatTurn
from chunkcache_api.chat_messages import SYSTEM_ROLES, chat_turns, joined_text
from chunkcache_api.schemas.chat import ContentPart, FileRef, Message
from chunkcache_api.schemas.responses import InputItem, InputPart, ResponsesRequest


def response_turns(request: ResponsesRequest) -> list[ChatTurn]:
    """The conversation behind the system messages.

    Raises:
        InvalidValueError: Users and assistants do not take turns, a user last.
    """
    messages = [_message(item) for item in request.input]
    first = len(_system_messages(messages))
    return chat_turns(messages, request.documents or (), first=first, name="input")


def response_system(request: ResponsesRequest) -> str | None:
    """The system prompt: instructions, then the system messages that the input begins with."""
    texts = [] if request.instructions is None else [request.instructions]
    texts += [joined_text(m) for m in _system_messages([_message(i) for i in request.input])]
    return "\n\n".join(texts) if texts else None


def _system_messages(messages: Sequence[Message]) -> list[Message]:
    return list(takewhile(lambda message: message.role in SYSTEM_ROLES, messages))


def _message(item: InputItem) -> Message:
    assert item.role is not None, "the schema asks for a role"
    return Message(role=item.role, content=[_part(part) for part in item.content])


def _part(part: InputPart) -> ContentPart:
    if part.type == "input_file":
        return ContentPart(type="file", file=FileRef(file_id=part.file_id))
    return ContentPart(type="text", text=part.text)
