"""The prompt's own text: a chat template split once into token segments around its place-holders.

Documents and the question are put between the segments as token ids that were made from them
alone; no text is ever assembled and tokenised again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from chunkcache.errors import UnsupportedModelError
from chunkcache.model.tokenising import TextTokenizer
from chunkcache.model.turns import split_turns

DEFAULT_SYSTEM = "You are a helpful AI assistant. Answer the question from the documents."
DOCUMENTS_INTRO = "Documents:\n\n"
DOCUMENT_JOINT = "\n\n"
QUESTION_INTRO = "\n\nQuestion: "
QUESTION_OUTRO = "\nAnswer in one short sentence."
PINNED_DATE = date(2024, 7, 26)
"""Templates that print today's date get this one: a prompt must not change overnight."""

_SYSTEM_MARK = "\ue000chunkcache-system\ue001"
_USER_MARK = "\ue000chunkcache-user\ue001"


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
            system text is put in front of the documents.
        before_text: From the system text to a message without documents.
        after_text: From a message, as it is, to where the answer starts.
        later_turns: What stands between turns; None for a template that takes one turn only.
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


def render_chat(
    chat_template: str, messages: Sequence[dict[str, str]], special_tokens: dict[str, str]
) -> str:
    """Render a chat template in a sandbox, with its clock pinned.

    Raises:
        UnsupportedModelError: The template raises, or tries what the sandbox forbids.
    """

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = PINNED_DATE.strftime
    try:
        return environment.from_string(chat_template).render(
            messages=list(messages),
            add_generation_prompt=True,
            date_string=PINNED_DATE.strftime("%d %b %Y"),
            **special_tokens,
        )
    except SecurityError as error:
        raise UnsupportedModelError(f"the chat template is not safe to run: {error}") from error
    except TemplateError as error:
        raise UnsupportedModelError(f"the chat template fails: {error}") from error


def split_template(
    render: Callable[[Sequence[dict[str, str]]], str] | None,
    tokenizer: TextTokenizer,
    bos_text: str,
) -> PromptTemplate:
    """Split a chat template into the segments of a :class:`PromptTemplate`.

    Args:
        render: Renders messages to text (:func:`render_chat` with its template bound); None for
            a model without a chat template, which gets plain text behind its BOS.
        tokenizer: Encodes the fixed parts.
        bos_text: Text of the BOS token, empty for a model without one.

    Raises:
        UnsupportedModelError: The template changes, repeats or drops what it is given.
    """
    if render is None:
        opening, middle, closing, has_system = bos_text, DOCUMENT_JOINT, "\n", True
        between: tuple[str, str] | None = (closing, DOCUMENT_JOINT)
    else:
        opening, middle, closing, has_system = _split_rendered(render)
        between = split_turns(render, has_system=has_system, closing=closing)
    return PromptTemplate(
        before_system=tokenizer.encode_template(opening),
        before_documents=tokenizer.encode_template(middle + DOCUMENTS_INTRO),
        joint=tokenizer.encode_template(DOCUMENT_JOINT),
        before_question=tokenizer.encode_template(QUESTION_INTRO),
        after_question=tokenizer.encode_template(QUESTION_OUTRO + closing),
        has_system=has_system,
        before_text=tokenizer.encode_template(middle),
        after_text=tokenizer.encode_template(closing),
        later_turns=None if between is None else _later_turns(*between, tokenizer),
    )


def _later_turns(to_reply: str, to_next: str, tokenizer: TextTokenizer) -> LaterTurns:
    return LaterTurns(
        before_reply=tokenizer.encode_template(to_reply),
        before_documents=tokenizer.encode_template(to_next + DOCUMENTS_INTRO),
        before_text=tokenizer.encode_template(to_next),
    )


def _split_rendered(
    render: Callable[[Sequence[dict[str, str]]], str],
) -> tuple[str, str, str, bool]:
    user = {"role": "user", "content": _USER_MARK}
    try:
        text = render([{"role": "system", "content": _SYSTEM_MARK}, user])
    except UnsupportedModelError:
        text = ""
    has_system = text.count(_SYSTEM_MARK) == 1
    if has_system and text.index(_SYSTEM_MARK) > text.find(_USER_MARK):
        raise UnsupportedModelError("the chat template prints the system text behind the user's")
    if not has_system:
        text = render([user])
    if text.count(_USER_MARK) != 1:
        raise UnsupportedModelError("the chat template does not print the user's text once")
    head, closing = text.split(_USER_MARK)
    if not has_system:
        return head, DOCUMENT_JOINT, closing, False
    opening, middle = head.split(_SYSTEM_MARK)
    return opening, middle, closing, True
