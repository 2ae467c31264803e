"""JSON in and out: bodies to pydantic models and values to bytes, off the event loop when large."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec
from anyio import to_thread
from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.responses import Response

from chunkcache.errors import InvalidValueError, UnsupportedParameterError
from chunkcache_api.error_responses import unknown_parameter, validation_error
from chunkcache_api.errors import UnsupportedMediaTypeError

ModelT = TypeVar("ModelT", bound=BaseModel)

_INLINE_BYTES: Final = 16 << 10
"""Bodies up to this size are parsed at once: a thread costs more."""


async def read_body(
    request: Request, model: type[ModelT], neutral: Mapping[str, Sequence[Any]] | None = None
) -> ModelT:
    """Read and check a request's body.

    Args:
        request: The request.
        model: What the body should be.
        neutral: Fields that are not implemented, each with the values (beside null) that ask for
            nothing; they are left out.

    Raises:
        UnsupportedMediaTypeError: It is not declared as JSON. A browser can send a form to any
            address without asking; it cannot send JSON so.
        InvalidValueError: It is not JSON (syntax, encoding, nesting), or a field is missing,
            unknown or out of range; ``param`` names it.
        UnsupportedParameterError: A field is not implemented, and asks for something.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise UnsupportedMediaTypeError("the body must be sent as content-type: application/json")
    body = await request.body()
    if len(body) <= _INLINE_BYTES:
        return parse_body(body, model, neutral)
    return await to_thread.run_sync(parse_body, body, model, neutral)


def parse_body(
    body: bytes, model: type[ModelT], neutral: Mapping[str, Sequence[Any]] | None = None
) -> ModelT:
    """Parse and check. Arguments and errors as in :func:`read_body`."""
    try:
        value = from_json(body)
    except ValueError as error:
        raise InvalidValueError(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidValueError("the body is not a JSON object")
    _leave_out(value, neutral or {})
    _refuse_unknown(value, model)
    try:
        return model.model_validate(value, strict=True)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False, include_input=False)
        raise validation_error(details) from error


def _leave_out(value: dict[str, Any], neutral: Mapping[str, Sequence[Any]]) -> None:
    for name, harmless in neutral.items():
        given = value.pop(name, None)
        # False equals 0, but does not mean it.
        asks = not any(
            given == h and isinstance(given, bool) == isinstance(h, bool) for h in harmless
        )
        if given is not None and asks:
            raise UnsupportedParameterError(f"{name} is not implemented", param=name)


def _refuse_unknown(value: dict[str, Any], model: type[BaseModel], parent: str = "") -> None:
    """Before validation, which would build an error for each of a megabyte of unknown fields."""
    fields = model.model_fields
    for name, item in value.items():
        if name not in fields:
            raise unknown_parameter(parent + name)
        kind = fields[name].annotation
        if isinstance(item, dict) and isinstance(kind, type) and issubclass(kind, BaseModel):
            _refuse_unknown(item, kind, f"{parent}{name}.")


def json_response(value: Any, status: int = 200) -> Response:
    """A response of JSON; call it on a worker thread for large values."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def body_schema(model: type[BaseModel], *, is_required: bool = True) -> dict[str, Any]:
    """``openapi_extra`` of a route that reads its body by :func:`read_body`."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})
    inlined = _inline(schema, definitions)
    content = {"application/json": {"schema": inlined}}
    return {"requestBody": {"required": is_required, "content": content}}


def _inline(value: Any, definitions: dict[str, Any]) -> Any:
    """Replace references by what they name: inside a route they would point nowhere."""
    if isinstance(value, list):
        return [_inline(v, definitions) for v in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        return _inline(definitions[value["$ref"].rpartition("/")[2]], definitions)
    return {k: _inline(v, definitions) for k, v in value.items()}
