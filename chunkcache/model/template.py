"""The prompt's own text: a chat template split once into token segments around its place-holders.

Documents and the question are put between the segments as token ids that were made from them
alone; no text is ever assembled and tokenised again.
"""

from collections.abc import Callable
from dataclasses import dataclass

from chunkcache.errors import UnsupportedModelError
from chunkcache.model.chat_template import ChatTemplate, Message
from chunkcache.model.tokenising import TextTokenizer
from chunkcache.model.turns import split_turns

DEFAULT_SYSTEM = "You are a helpful AI assistant. Answer the question from the documents."
DOCUMENTS_INTRO = "Documents:\n\n"
DOCUMENT_JOINT = "\n\n"
QUESTION_INTRO = "\n\nQuestion: "
QUESTION_OUTRO = "\nAnswer in one short sentence."

_SYSTEM_MARK = "\ue000chunkcache-system\ue001"
_USER_MARK = "\ue000chunkcache-user\ue001"
_PADDING = " \n "
"""White space around a mark, to see whether a template strips it."""


@dataclass(frozen=True)
class LaterTurns:
    """Token segments between a user's message and what follows it in a conversation.

    Attributes:
        before_reply: From the message to the reply that was given.
        before_documents: From a reply to the first document of the next message.
        before_text: From a reply to the next message, where that has no documents.
    """

    before_reply: tuple[int, ...]
    before_documents: tuple[int, ...]
    before_text: tuple[int, ...]


@dataclass(frozen=True)
class PromptTemplate:
    """Token segments of a prompt's fixed text.

    Attributes:
        before_system: From the start to the system text (BOS included, where there is one).
        before_documents: From the system text to the first document.
        joint: Between two documents.
        before_question: From the last document to the question.
        after_question: From the question to where the answer starts.
        has_system: Whether the template has a place for a system text; where it does not, the
            system text is put in front of the documents, in the user's turn.
        before_text: From the system text to a message without documents.
        after_text: From a message, as it is, to where the answer starts.
        later_turns: What stands between turns; None for a template that takes one turn only.
        trims_system_start: Whether the template strips white space in front of the system text.
        trims_system_end: The same, behind it.
        parts_as_lists: Whether the template wants a message's content as a list of parts.
    """

    before_system: tuple[int, ...]
    before_documents: tuple[int, ...]
    joint: tuple[int, ...]
    before_question: tuple[int, ...]
    after_question: tuple[int, ...]
    has_system: bool
    before_text: tuple[int, ...] = ()
    after_text: tuple[int, ...] = ()
    later_turns: LaterTurns | None = None
    trims_system_start: bool = False
    trims_system_end: bool = False
    parts_as_lists: bool = False

    def system_text(self, text: str) -> str:
        """The system text as this template prints it."""
        text = text.lstrip() if self.trims_system_start else text
        return text.rstrip() if self.trims_system_end else text

    def messages(self, system: str, user: str) -> tuple[Message, ...]:
        """The messages that the segments stand for: what the template itself would be given."""
        if self.has_system:
            return _messages(system, user, parts_as_lists=self.parts_as_lists)
        return _messages(None, system + DOCUMENT_JOINT + user, parts_as_lists=self.parts_as_lists)


@dataclass(frozen=True)
class _Split:
    """A rendered template's text around its two marks."""

    opening: str
    middle: str
    closing: str
    has_system: bool = True
    trims_system_start: bool = False
    trims_system_end: bool = False
    parts_as_lists: bool = False


def split_template(chat: ChatTemplate, tokenizer: TextTokenizer) -> PromptTemplate:
    """Split a chat template into the segments of a :class:`PromptTemplate`.

    Args:
        chat: The template.
        tokenizer: Encodes the fixed parts.

    Raises:
        UnsupportedModelError: The template changes, repeats or drops what it is given.
    """
    split = _split_rendered(chat)

    between = split_turns(
        lambda messages: chat.render(
            [_message(m["role"], m["content"], split.parts_as_lists) for m in messages]
        ),
        has_system=split.has_system,
        closing=split.closing,
    )

    def inner(text: str) -> tuple[int, ...]:
        return tokenizer.encode_template(text, at_start=False)

    return PromptTemplate(
        before_system=tokenizer.encode_template(split.opening),
        before_documents=inner(split.middle + DOCUMENTS_INTRO),
        joint=inner(DOCUMENT_JOINT),
        before_question=inner(QUESTION_INTRO),
        after_question=inner(QUESTION_OUTRO + split.closing),
        has_system=split.has_system,
        before_text=inner(split.middle),
        after_text=inner(split.closing),
        later_turns=None if between is None else _later_turns(between, inner),
        trims_system_start=split.trims_system_start,
        trims_system_end=split.trims_system_end,
        parts_as_lists=split.parts_as_lists,
    )


def user_text(documents: str, question: str) -> str:
    """What the user's turn says, as one text: what the segments and ids stand for."""
    return DOCUMENTS_INTRO + documents + QUESTION_INTRO + question + QUESTION_OUTRO


def _later_turns(between: tuple[str, str], encode: Callable[[str], tuple[int, ...]]) -> LaterTurns:
    to_reply, to_next = between
    return LaterTurns(
        before_reply=encode(to_reply),
        before_documents=encode(to_next + DOCUMENTS_INTRO),
        before_text=encode(to_next),
    )


def _message(role: str, text: str, parts_as_lists: bool) -> Message:
    return {"role": role, "content": [{"type": "text", "text": text}] if parts_as_lists else text}


def _messages(system: str | None, user: str, *, parts_as_lists: bool) -> tuple[Message, ...]:
    turns = (_message("user", user, parts_as_lists),)
    return turns if system is None else (_message("system", system, parts_as_lists), *turns)


def _split_rendered(chat: ChatTemplate) -> _Split:
    """The first form of messages, from the commonest on, of which the template prints each once."""
    refusal: UnsupportedModelError | None = None
    for has_system in (True, False):
        for parts_as_lists in (False, True):
            form = _Form(chat, has_system, parts_as_lists)
            try:
                text = form.render()
            except UnsupportedModelError as error:
                if not parts_as_lists:
                    refusal = error
                continue
            if text.count(_USER_MARK) == 1 and text.count(_SYSTEM_MARK) == has_system:
                return form.split(text)
            if not parts_as_lists:
                refusal = None
    raise refusal or UnsupportedModelError(
        "the chat template does not print the user's text once, as it is"
    )


@dataclass(frozen=True)
class _Form:
    """One way to put the marks into messages."""

    chat: ChatTemplate
    has_system: bool
    parts_as_lists: bool

    def render(self, *, padding: str = "") -> str:
        """The text with the marks in it; white space around the first of them."""
        first = _SYSTEM_MARK if self.has_system else _USER_MARK
        padded = padding + first + padding
        return self.chat.render(
            _messages(padded, _USER_MARK, parts_as_lists=self.parts_as_lists)
            if self.has_system
            else _messages(None, padded, parts_as_lists=self.parts_as_lists)
        )

    def split(self, text: str) -> _Split:
        mark = _SYSTEM_MARK if self.has_system else _USER_MARK
        opening, behind = text.split(mark)
        if self.has_system and _USER_MARK in opening:
            raise UnsupportedModelError(
                "the chat template prints the system text behind the user's"
            )
        middle, closing = behind.split(_USER_MARK) if self.has_system else (DOCUMENT_JOINT, behind)
        padded_opening, _, padded_behind = self.render(padding=_PADDING).partition(mark)
        return _Split(
            opening,
            middle,
            closing,
            has_system=self.has_system,
            trims_system_start=padded_opening == opening,
            trims_system_end=self.has_system and padded_behind == behind,
            parts_as_lists=self.parts_as_lists,
        )
