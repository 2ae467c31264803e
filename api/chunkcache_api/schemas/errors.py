"""The body of every error, for the description of the API."""

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    """For people."""
    type: str
    """``invalid_request_error``, ``rate_limit_error`` or ``server_error``."""
    param: str | None
    """The field that is to blame, if one is."""
    code: str
    """For programs; stable."""


class ErrorBody(BaseModel):
    """An error."""

    error: ErrorDetail
    """What went wrong."""
