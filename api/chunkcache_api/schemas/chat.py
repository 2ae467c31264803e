"""The body of ``POST /v1/chat/completions``: OpenAI's fields, as far as they are implemented."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from chunkcache.errors import InvalidValueError, UnsupportedParameterError
from chunkcache.planning import MAX_TOP_LOGPROBS
from chunkcache_api.schemas.query import (
    FiniteFloat,
    GivenDocumentId,
    Name,
    ReuseOptions,
)
from chunkcache_api.schemas.query_text import PromptText

MAX_MESSAGES: Final = 2_000
MAX_PARTS: Final = 1_000

Label = Annotated[str, Field(max_length=512)]
"""Short, because the accounts of many requests keep it in memory; OpenAI's bound on its values."""

NEUTRAL_VALUES: Final[Mapping[str, tuple[Any, ...]]] = {
    "audio": (),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_cache_key": (),
    "reasoning_effort": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
"""OpenAI's parameters that are not implemented, with the values that ask for nothing (and null)."""


def _as_parts(content: Any) -> Any:
    """A message's text is short for one text part."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [] if content is None else content


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


ChunkIndexes = Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_PARTS)]
"""Which chunks of a document stand in the prompt, as a search gives them."""


class FileRef(BaseModel):
    """A stored document."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    file_id: GivenDocumentId | None = None
    """Its id."""
    chunk_indexes: ChunkIndexes | None = None
    """These chunks alone; all if left out."""


class ContentPart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Name
    """``text`` or, in a user's message, ``file``."""
    text: PromptText | None = None
    """The text, for a part of that type."""
    file: FileRef | None = None
    """The document, for a part of that type."""


class Message(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Name
    """``system`` (or ``developer``), ``user`` or ``assistant``."""
    content: Annotated[
        list[ContentPart],
        BeforeValidator(_as_parts, json_schema_input_type=str | list[ContentPart] | None),
        Field(max_length=MAX_PARTS),
    ] = Field(default_factory=list)
    """Text, or parts. In a user's message every text part but the last is a document."""
    name: Any = None
    refusal: Any = None
    audio: Any = None
    function_call: Any = None
    tool_call_id: Any = None
    tool_calls: Any = None
    annotations: Any = None


class GivenDocument(BaseModel):
    """A document in front of the first message."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: GivenDocumentId
    """A stored document; with ``text``, what reports call it."""
    text: PromptText | None = None
    """Its text, if it is not to be looked up: matched by content, and not stored."""
    chunk_indexes: ChunkIndexes | None = None
    """Of a stored document these chunks alone; all if left out."""


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    include_usage: bool | None = None
    """End with a chunk that holds the usage."""
    include_obfuscation: Literal[False] | None = None
    """Not implemented: chunks are never padded."""


class JsonSchema(BaseModel):
    """A JSON schema for answers."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    name: Name
    """Its name; says nothing to the model."""
    schema_: Annotated[dict[str, Any], Field(alias="schema")] = Field(default_factory=dict)
    """The schema."""
    description: str | None = None
    """Says nothing to the model."""
    strict: bool | None = None
    """The schema always holds."""


class ResponseFormat(BaseModel):
    """What form answers have."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["text", "json_object", "json_schema"]
    """Free text, a JSON object, or JSON of a schema."""
    json_schema: JsonSchema | None = None
    """The schema, for that type."""

    def schema_of_answers(self) -> Mapping[str, Any] | None:
        """The schema that answers have to keep to, if any.

        Raises:
            InvalidValueError: Type and schema do not go together.
        """
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise InvalidValueError(
                "give json_schema with the type json_schema", param="response_format.json_schema"
            )
        if self.json_schema is not None:
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None


class ChatReuseOptions(ReuseOptions):
    """What is particular to this service."""

    as_question: bool = False
    """Put the messages as ``/v1/query`` puts its question: asked to be answered in a sentence."""


class ChatRequest(BaseModel):
    """A conversation that is to go on."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: Name
    """The served model's name."""
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    """A system message, if any, then users and assistants in turn, a user last."""
    documents: Annotated[list[GivenDocument], Field(max_length=MAX_PARTS)] | None = None
    """Documents in front of the first message."""
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """Largest number of answer tokens; the server's limit if left out."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """The same under its older name."""
    temperature: Annotated[FiniteFloat, Field(ge=0.0, le=2.0)] | None = None
    """0 is greedy; 1 if left out."""
    top_p: Annotated[FiniteFloat, Field(gt=0.0, le=1.0)] | None = None
    """Keep the most likely tokens whose probabilities add up to this; 1 if left out."""
    n: Annotated[int, Field(ge=1)] | None = None
    """Answers to draw; 1 if left out."""
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    """Seed of the draws; a fresh one if left out, which the response names."""
    stop: (
        Annotated[list[str], BeforeValidator(_as_list, json_schema_input_type=str | list[str])]
        | None
    ) = None
    """Strings that end an answer, and are not part of it."""
    logprobs: bool | None = None
    """Give the log probability of each token."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """How many of the likeliest tokens to give beside each; needs ``logprobs``."""
    response_format: ResponseFormat | None = None
    """What form answers have."""
    stream: bool | None = None
    """Answer as server-sent events."""
    stream_options: StreamOptions | None = None
    """Options of the stream; needs ``stream``."""
    user: Label | None = None
    """Shown in the account of the request."""
    safety_identifier: Label | None = None
    """Shown in the account of the request."""
    metadata: Annotated[dict[Label, Label], Field(max_length=16)] | None = None
    """Shown in the account of the request."""
    chunkcache: ChatReuseOptions = ChatReuseOptions()
    """What is particular to this service."""

    @model_validator(mode="after")
    def _check_together(self) -> "ChatRequest":
        if self.stream_options is not None and not self.stream:
            raise InvalidValueError(
                "stream_options are for streams; set stream", param="stream_options"
            )
        if self.stream and self.chunkcache.dry_run:
            raise InvalidValueError("a dry run cannot be streamed", param="stream")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidValueError("top_logprobs needs logprobs", param="top_logprobs")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise InvalidValueError(
                "max_tokens and max_completion_tokens differ; give one", param="max_tokens"
            )
        if self.response_format is not None:
            self.response_format.schema_of_answers()
        for index, document in enumerate(self.documents or ()):
            if document.text is not None and document.chunk_indexes is not None:
                raise InvalidValueError(
                    "chunk_indexes are of a stored document; it comes without a text",
                    param=f"documents[{index}].chunk_indexes",
                )
        for index, message in enumerate(self.messages):
            _check_message(message, f"messages[{index}]")
        return self


_MESSAGE_FIELDS: Final = (
    "name",
    "refusal",
    "audio",
    "function_call",
    "tool_call_id",
    "tool_calls",
    "annotations",
)
"""Not implemented; replies that are sent back may hold them, empty."""


def _check_message(message: Message, param: str) -> None:
    """Refuse roles, fields and parts that are not implemented."""
    for name in _MESSAGE_FIELDS:
        if getattr(message, name) not in (None, []):
            raise UnsupportedParameterError(f"{name} is not implemented", param=f"{param}.{name}")
    if message.role not in ("system", "developer", "user", "assistant"):
        raise UnsupportedParameterError(
            f"messages of the role {message.role!r} are not supported", param=f"{param}.role"
        )
    for index, part in enumerate(message.content):
        at = f"{param}.content[{index}]"
        if part.type not in ("text", "file") or (part.type == "file" and message.role != "user"):
            raise UnsupportedParameterError(
                f"parts of the type {part.type!r} are not supported here", param=f"{at}.type"
            )
        if (part.type == "text") != (part.text is not None):
            raise InvalidValueError("a text part has a text", param=f"{at}.text")
        if (part.type == "file") != (part.file is not None):
            raise InvalidValueError("a file part has a file", param=f"{at}.file")
        if part.file is not None and part.file.file_id is None:
            raise InvalidValueError("a file part names a file_id", param=f"{at}.file.file_id")
