"""The body of ``POST /v1/responses``: OpenAI's fields, as far as they are implemented."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from chunkcache.errors import InvalidValueError, UnsupportedParameterError
from chunkcache.planning import MAX_TOP_LOGPROBS
from chunkcache_api.schemas.chat import (
    MAX_MESSAGES,
    MAX_PARTS,
    GivenDocument,
    Label,
    StreamOptions,
)
from chunkcache_api.schemas.query import FiniteFloat, GivenDocumentId, Name, ReuseOptions
from chunkcache_api.schemas.query_text import PromptText

NEUTRAL_VALUES: Final[Mapping[str, tuple[Any, ...]]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "frequency_penalty": (0,),
    "max_tool_calls": (),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "prompt": (),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "reasoning": ({}, {"effort": "none"}),
    "service_tier": ("auto", "default"),
    "tool_choice": ("auto", "none"),
    "tools": ([],),
    "truncation": ("disabled",),
}
"""OpenAI's parameters that are not implemented, with the values that ask for nothing (and null)."""

LOGPROBS: Final = "message.output_text.logprobs"
"""What ``include`` may hold."""

_ROLES: Final = ("system", "developer", "user", "assistant")
_TEXT_TYPES: Final = {"user": "input_text", "assistant": "output_text"}
_REFUSED_PART_FIELDS: Final = ("refusal", "file_data", "file_url", "image_url")


class InputPart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Name
    """``input_text``; in a user's message also ``input_file``; ``output_text`` in a reply."""
    text: PromptText | None = None
    """The text, for a part of that type."""
    file_id: GivenDocumentId | None = None
    """A stored document, for ``input_file``."""
    filename: Label | None = None
    """Says nothing to the model."""
    annotations: Any = None
    logprobs: Any = None
    detail: Any = None
    refusal: Any = None
    file_data: Any = None
    file_url: Any = None
    image_url: Any = None


def _as_input_parts(content: Any) -> Any:
    """A message's text is short for one text part, of whichever type its role has."""
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


class InputItem(BaseModel):
    """A message of the conversation."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Name = "message"
    """``message``."""
    role: Name | None = None
    """``system`` (or ``developer``), ``user`` or ``assistant``."""
    content: Annotated[
        list[InputPart],
        BeforeValidator(_as_input_parts, json_schema_input_type=str | list[InputPart]),
        Field(max_length=MAX_PARTS),
    ] = Field(default_factory=list)
    """Text, or parts. In a user's message every text part but the last is a document."""
    id: Label | None = None
    """Of a reply that is sent back; not looked at."""
    status: Label | None = None
    """Likewise."""
    phase: Label | None = None
    """Likewise."""


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class TextFormat(BaseModel):
    """What form the answer has."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    type: Literal["text", "json_object", "json_schema"]
    """Free text, a JSON object, or JSON of a schema."""
    name: Name | None = None
    """The schema's name; says nothing to the model."""
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    """The schema, for that type."""
    description: str | None = None
    """Says nothing to the model."""
    strict: bool | None = None
    """The schema always holds."""

    @model_validator(mode="after")
    def _check_together(self) -> "TextFormat":
        has_schema = self.schema_ is not None
        if (self.type == "json_schema") != has_schema or has_schema != (self.name is not None):
            raise InvalidValueError(
                "give name and schema with the type json_schema", param="text.format"
            )
        return self

    def schema_of_answers(self) -> Mapping[str, Any] | None:
        """The schema that the answer has to keep to, if any."""
        return {"type": "object"} if self.type == "json_object" else self.schema_


class TextOptions(BaseModel):
    """How the answer's text is to be."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: TextFormat = TextFormat(type="text")
    """Its form."""
    verbosity: Literal["medium"] | None = None
    """Not implemented."""


class ResponsesRequest(BaseModel):
    """What is to be answered."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: Name
    """The served model's name."""
    input: Annotated[
        list[InputItem],
        BeforeValidator(_as_items, json_schema_input_type=str | list[InputItem]),
        Field(min_length=1, max_length=MAX_MESSAGES),
    ]
    """A message, or a conversation: system messages, if any, then users and assistants in turn."""
    instructions: PromptText | None = None
    """System prompt, in front of system messages; the server's default if there are neither."""
    documents: Annotated[list[GivenDocument], Field(max_length=MAX_PARTS)] | None = None
    """Documents in front of the first message; not a field of OpenAI's."""
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    """Largest number of answer tokens; the server's limit if left out."""
    temperature: Annotated[FiniteFloat, Field(ge=0.0, le=2.0)] | None = None
    """0 is greedy; 1 if left out."""
    top_p: Annotated[FiniteFloat, Field(gt=0.0, le=1.0)] | None = None
    """Keep the most likely tokens whose probabilities add up to this; 1 if left out."""
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    """Seed of the draws; a fresh one if left out, which the response names. Not OpenAI's."""
    text: TextOptions | None = None
    """What form the answer has."""
    include: Annotated[list[Name], Field(max_length=16)] | None = None
    """What else to return: ``message.output_text.logprobs``, or nothing."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """How many of the likeliest tokens to give beside each; needs that ``include``."""
    stream: bool | None = None
    """Answer as server-sent events."""
    stream_options: StreamOptions | None = None
    """Options of the stream; needs ``stream``."""
    store: bool | None = None
    """Responses are not kept: true is refused."""
    previous_response_id: Name | None = None
    """Refused: responses are not kept; send the conversation in ``input``."""
    user: Label | None = None
    """Shown in the account of the request."""
    safety_identifier: Label | None = None
    """Shown in the account of the request."""
    metadata: Annotated[dict[Label, Label], Field(max_length=16)] | None = None
    """Shown in the account of the request."""
    chunkcache: ReuseOptions = ReuseOptions()
    """What is particular to this service."""

    @property
    def wants_logprobs(self) -> bool:
        """Whether log probabilities are to be returned."""
        return LOGPROBS in (self.include or ())

    @model_validator(mode="after")
    def _check_together(self) -> "ResponsesRequest":
        if self.previous_response_id is not None or self.store:
            name = "store" if self.previous_response_id is None else "previous_response_id"
            raise UnsupportedParameterError(
                f"{name} is not implemented: responses are not kept here; send the conversation's "
                "earlier messages in input",
                param=name,
            )
        for index, wanted in enumerate(self.include or ()):
            if wanted != LOGPROBS:
                raise UnsupportedParameterError(
                    f"include takes {LOGPROBS!r} alone", param=f"include[{index}]"
                )
        if self.top_logprobs and not self.wants_logprobs:
            raise InvalidValueError(
                f"top_logprobs needs {LOGPROBS!r} in include", param="top_logprobs"
            )
        if self.stream_options is not None and not self.stream:
            raise InvalidValueError(
                "stream_options are for streams; set stream", param="stream_options"
            )
        if self.stream_options is not None and self.stream_options.include_usage is not None:
            raise UnsupportedParameterError(
                "include_usage is of chat completions: a response always ends with its usage",
                param="stream_options.include_usage",
            )
        if self.stream and self.chunkcache.dry_run:
            raise InvalidValueError("a dry run cannot be streamed", param="stream")
        for index, item in enumerate(self.input):
            _check_item(item, f"input[{index}]")
        return self


def _check_item(item: InputItem, param: str) -> None:
    """Refuse items, roles and parts that are not implemented."""
    if item.type != "message":
        raise UnsupportedParameterError(
            f"items of the type {item.type!r} are not supported", param=f"{param}.type"
        )
    if item.role not in _ROLES:
        raise UnsupportedParameterError(
            f"messages of the role {item.role!r} are not supported", param=f"{param}.role"
        )
    for index, part in enumerate(item.content):
        at = f"{param}.content[{index}]"
        is_file = part.type == "input_file" and item.role == "user"
        if not is_file and part.type not in ("input_text", _TEXT_TYPES.get(item.role)):
            raise UnsupportedParameterError(
                f"parts of the type {part.type!r} are not supported here", param=f"{at}.type"
            )
        for name in _REFUSED_PART_FIELDS:
            if getattr(part, name) is not None:
                raise UnsupportedParameterError(
                    f"{name} is not implemented; upload the file, and give its file_id",
                    param=f"{at}.{name}",
                )
        if is_file != (part.file_id is not None):
            raise InvalidValueError("a file part names a file_id", param=f"{at}.file_id")
        if is_file == (part.text is not None):
            raise InvalidValueError("a text part has a text", param=f"{at}.text")
