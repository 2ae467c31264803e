"""How a chat template sets the turns of a conversation apart: its text behind an answer.

Knows the template as a function from messages to text, and nothing of tokens.
"""

from collections.abc import Callable, Sequence
from itertools import chain, zip_longest

from chunkcache.errors import UnsupportedModelError

Render = Callable[[Sequence[dict[str, str]]], str]

_SYSTEM_MARK = "\ue000chunkcache-system\ue001"
_USER_MARKS = tuple(f"\ue000chunkcache-user-{i}\ue001" for i in range(3))
_REPLY_MARKS = tuple(f"\ue000chunkcache-reply-{i}\ue001" for i in range(2))


def split_turns(render: Render, *, has_system: bool, closing: str) -> tuple[str, str] | None:
    """The template's text between a user's message and the reply, and behind that.

    Args:
        render: Renders messages to text.
        has_system: Whether the template takes a system message.
        closing: Its text behind the last message, as the single question has it.

    Returns:
        From a message to its reply, and from the reply to the next message; None where the
        template does not treat all turns alike, so that a conversation cannot be laid out from
        pieces.
    """
    messages = [{"role": "system", "content": _SYSTEM_MARK}] if has_system else []
    marks = [m for m in chain(*zip_longest(_USER_MARKS, _REPLY_MARKS)) if m is not None]
    for mark in marks:
        role = "user" if mark in _USER_MARKS else "assistant"
        messages.append({"role": role, "content": mark})
    try:
        rest = render(messages)
    except UnsupportedModelError:
        return None
    pieces: list[str] = []
    for mark in marks:
        if rest.count(mark) != 1:
            return None
        piece, rest = rest.split(mark)
        pieces.append(piece)
    _, to_reply, to_next, to_reply_again, to_next_again = pieces
    is_regular = (to_reply, to_next, rest) == (to_reply_again, to_next_again, closing)
    return (to_reply, to_next) if is_regular else None
