"""Where a remote tier is: its URL, taken apart, checked, and shown without secrets.

Knows which schemes there are, and no client library.
"""

from dataclasses import dataclass
from typing import Final, Literal, Self
from urllib.parse import SplitResult, urlsplit

from chunkcache.errors import InvalidValueError

RemoteKind = Literal["object_store", "redis"]

_KINDS: Final[dict[str, RemoteKind]] = {
    **dict.fromkeys(("s3", "gs", "az", "file"), "object_store"),
    **dict.fromkeys(("redis", "rediss", "valkey", "valkeys"), "redis"),
}
_FORMS: Final = (
    "s3://bucket/prefix, gs://bucket/prefix, az://account/container/prefix, file:///directory, "
    "redis://host:port/db or valkey://host:port/db (rediss://, valkeys:// with TLS)"
)


@dataclass(frozen=True)
class RemoteAddress:
    """A checked URL.

    Attributes:
        url: As it was given, with whatever secrets are in it: not for people.
        kind: Which backend speaks to it.
        scheme: In lower case.
    """

    url: str
    kind: RemoteKind
    scheme: str

    @classmethod
    def parse(cls, url: str) -> Self:
        """Check a URL.

        Raises:
            InvalidValueError: It is none that a remote tier can have; the message repeats nothing
                that may be secret.
        """
        try:
            parts = urlsplit(url)
            has_port_or_none = parts.port is None or parts.port > 0
        except ValueError:
            raise _refusal("is not a URL") from None
        kind = _KINDS.get(parts.scheme.lower())
        if kind is None:
            raise _refusal("has no scheme that is known")
        if not has_port_or_none or (parts.scheme.lower() == "file") == bool(parts.hostname):
            raise _refusal("names no place")
        if kind == "object_store" and ("@" in parts.netloc or parts.query or parts.fragment):
            raise _refusal(
                "may hold a bucket and a prefix alone; credentials come from the environment "
                "(AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_KEY, ...)"
            )
        if kind == "object_store" and not parts.path.strip("/") and parts.scheme == "file":
            raise _refusal("names no place")
        if kind == "redis" and parts.path.strip("/") and not parts.path.strip("/").isdecimal():
            raise _refusal("must end with the number of a database, if with anything")
        return cls(url, kind, parts.scheme.lower())

    @property
    def shown(self) -> str:
        """The URL without user, password and query: for logs, reports and errors."""
        return mask_url(self.url)

    def __repr__(self) -> str:
        """Masked too: reprs end up in logs."""
        return f"RemoteAddress({self.shown!r})"


def mask_url(url: str) -> str:
    """A URL of which user, password and query are replaced by stars."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "***"
    if not parts.scheme:
        return "***"
    host = parts.netloc.rpartition("@")[2]
    netloc = f"***@{host}" if "@" in parts.netloc else host
    query = "***" if parts.query else ""
    return SplitResult(parts.scheme, netloc, parts.path, query, "").geturl()


def _refusal(reason: str) -> InvalidValueError:
    return InvalidValueError(f"setting remote: the URL {reason}; use {_FORMS}", param="remote")
