"""The parameters of ``/v1/files``; an upload is a form, not JSON."""

from typing import Annotated, Final, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from chunkcache.errors import InvalidValueError, UnsupportedParameterError
from chunkcache_api.error_responses import unknown_parameter
from chunkcache_api.paging import Order

Purpose = Literal["assistants", "user_data"]
PURPOSES: Final = get_args(Purpose)

MAX_FILES: Final = 10_000
MIN_LIFETIME_SECONDS: Final = 3_600
MAX_LIFETIME_SECONDS: Final = 2_592_000

_OTHER_PURPOSES: Final = ("batch", "evals", "fine-tune", "vision")
_ANCHOR: Final = "expires_after[anchor]"
_SECONDS: Final = "expires_after[seconds]"

UPLOAD_SCHEMA: Final = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": list(PURPOSES)},
                        _ANCHOR: {"type": "string", "enum": ["created_at"]},
                        _SECONDS: {
                            "type": "integer",
                            "minimum": MIN_LIFETIME_SECONDS,
                            "maximum": MAX_LIFETIME_SECONDS,
                        },
                    },
                    "additionalProperties": False,
                }
            }
        },
    }
}
"""``openapi_extra`` of the upload."""


class ListFilesParams(BaseModel):
    """Which files to list."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    after: str | None = None
    """Begin behind this id."""
    limit: Annotated[int, Field(ge=1, le=MAX_FILES)] = MAX_FILES
    """At most so many."""
    order: Order = "desc"
    """The oldest or the newest first."""
    purpose: str | None = None
    """Only files of this purpose."""


def check_fields(names: "set[str]") -> None:
    """Refuse fields of a form that an upload has not.

    Raises:
        UnsupportedParameterError: There is one.
        InvalidValueError: One is missing.
    """
    for name in sorted(names - {"file", "purpose", _ANCHOR, _SECONDS}):
        raise unknown_parameter(name)
    for name in ("file", "purpose"):
        if name not in names:
            raise InvalidValueError(f"the form has no field {name}", param=name)


def checked_purpose(given: str) -> Purpose:
    """The purpose of an upload.

    Raises:
        UnsupportedParameterError: It is one of OpenAI's that this service does nothing for.
        InvalidValueError: It is none.
    """
    for purpose in PURPOSES:
        if purpose == given:
            return purpose
    if given in _OTHER_PURPOSES:
        raise UnsupportedParameterError(
            f"files for {given} are not supported; give {' or '.join(PURPOSES)}", param="purpose"
        )
    raise InvalidValueError(f"purpose is not {' or '.join(PURPOSES)}", param="purpose")


def lifetime_seconds(anchor: str | None, seconds: str | None) -> int | None:
    """How long an uploaded file is to be kept; None is for ever.

    Raises:
        InvalidValueError: The two fields do not go together, or are out of range.
    """
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidValueError(f"{_ANCHOR} is not 'created_at'", param=_ANCHOR)
    is_number = seconds is not None and seconds.isascii() and seconds.isdigit()
    if seconds is None or not is_number or len(seconds) > len(str(MAX_LIFETIME_SECONDS)):
        raise InvalidValueError(f"{_SECONDS} is not a number of seconds", param=_SECONDS)
    if not MIN_LIFETIME_SECONDS <= int(seconds) <= MAX_LIFETIME_SECONDS:
        raise InvalidValueError(
            f"{_SECONDS} is not within {MIN_LIFETIME_SECONDS} and {MAX_LIFETIME_SECONDS}",
            param=_SECONDS,
        )
    return int(seconds)
