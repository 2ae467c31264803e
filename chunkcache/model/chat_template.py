"""A model's own chat template, rendered to text in a sandbox whose clock stands still.

Knows Jinja and what templates expect around them; nothing of tokens or of our prompt's parts.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from chunkcache.errors import UnsupportedModelError

PINNED_DATE = date(2024, 7, 26)
"""Templates that print today's date get this one: a prompt must not change overnight."""

PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{{ '\\n' if message['role'] == 'user' else '\\n\\n' }}{% endfor %}"
)
"""For models without a chat template: BOS, where there is one, then the texts with a blank line
between them; an answer begins on the line below the question."""

Message = Mapping[str, Any]


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template with what it is rendered with.

    Attributes:
        source: Its Jinja text.
        special_tokens: Texts of the special tokens that it may name, such as ``bos_token``.
        thinking: What a template with a switch for it (``enable_thinking``, ``thinking``) is told:
            whether the model writes its thoughts in front of the answer.
    """

    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    thinking: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether this is not a model's own template, but stands in for a missing one."""
        return self.source == PLAIN_TEMPLATE

    def render(self, messages: Sequence[Message], *, opens_answer: bool = True) -> str:
        """The text of some messages.

        Args:
            messages: Each with ``role`` and ``content``.
            opens_answer: Whether the text ends where the model's turn begins.

        Raises:
            UnsupportedModelError: The template raises, or tries what the sandbox forbids.
        """
        try:
            return (
                _environment()
                .from_string(self.source)
                .render(
                    messages=[dict(m) for m in messages],
                    tools=None,
                    documents=None,
                    add_generation_prompt=opens_answer,
                    enable_thinking=self.thinking,
                    thinking=self.thinking,
                    date_string=PINNED_DATE.strftime("%d %b %Y"),
                    **self.special_tokens,
                )
            )
        except SecurityError as error:
            raise UnsupportedModelError(f"the chat template is not safe to run: {error}") from error
        except Exception as error:  # a template can make Python raise anything: no memory, too deep
            reason = str(error) or type(error).__name__
            raise UnsupportedModelError(f"the chat template fails: {reason}") from error


class _Generation(Extension):
    """``{% generation %}``, which marks the model's words for training: its body, unchanged."""

    tags = {"generation"}  # noqa: RUF012 (as the base class declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """What the library's templates are written for."""

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    names: dict[str, Callable[..., Any]] = {
        "raise_exception": raise_exception,
        "strftime_now": PINNED_DATE.strftime,
    }
    environment.globals.update(names)
    # Jinja's own filter escapes for HTML.
    environment.filters["tojson"] = to_json
    return environment
