"""Messages of any framework as turns: users and assistants take turns, a user last."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from chunkcache.errors import InvalidValueError
from chunkcache_retriever.adapters.client import ContextPart, Turn

_BETWEEN = "\n\n"


@dataclass(frozen=True)
class Said:
    """A message.

    Attributes:
        role: Who said it.
        text: What.
        context: What stands in front of it; a user's message alone has any.
    """

    role: Literal["system", "user", "assistant"]
    text: str
    context: tuple[ContextPart, ...] = ()


def read_conversation(messages: Iterable[Said]) -> tuple[str | None, list[Turn]]:
    """System prompt and turns. Messages of one role in a row are joined by an empty line.

    Raises:
        InvalidValueError: It begins with an answer, or does not end with a user's message.
    """
    system: list[str] = []
    turns: list[Turn] = []
    for said in messages:
        if said.role == "system":
            system.append(said.text)
        elif said.role == "assistant":
            if not turns:
                raise InvalidValueError("the conversation begins with an answer", param="messages")
            last = turns.pop()
            reply = [last.reply] if last.reply is not None else []
            turns.append(Turn(last.text, last.context, _BETWEEN.join([*reply, said.text])))
        elif turns and turns[-1].reply is None:
            last = turns.pop()
            text = _BETWEEN.join((last.text, said.text))
            turns.append(Turn(text, (*last.context, *said.context)))
        else:
            turns.append(Turn(said.text, said.context))
    if not turns or turns[-1].reply is not None:
        raise InvalidValueError("the last message is not a user's", param="messages")
    return (_BETWEEN.join(system) if system else None), turns
