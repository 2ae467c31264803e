"""One API key: how it is made, what is kept of it, what it allows. Knows no file and no HTTP."""

import secrets
import time
from dataclasses import dataclass
from hmac import compare_digest
from typing import Final, Literal, get_args

from blake3 import blake3

from chunkcache.errors import InvalidValueError

Scope = Literal["query", "ingest", "admin"]
"""Ask questions and read documents; change documents; look after the server. None holds another."""

SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)
MAX_NAME_CHARS: Final = 128
MAX_EXPIRES_AT: Final = 253_402_300_799
"""The end of the year 9999, Unix seconds: no later day has a name, and infinity reads as never."""

_MARK: Final = "cck"
_ID_BYTES: Final = 8
_SECRET_BYTES: Final = 32


@dataclass(frozen=True)
class ApiKey:
    """What is kept of a key. The key itself cannot be computed from it.

    Attributes:
        key_id: Part of the key, which tells keys apart; no secret.
        digest: BLAKE3 of the whole key, 32 bytes. A key holds 256 random bits, so that a fast
            digest gives nothing away.
        tenant: Whose data it opens.
        scopes: What it allows.
        name: What people call it.
        created_at: Unix seconds.
        expires_at: Unix seconds from which on it is refused; None is never.
    """

    key_id: str
    digest: bytes
    tenant: str
    scopes: frozenset[Scope]
    name: str | None
    created_at: float
    expires_at: float | None

    def __post_init__(self) -> None:
        """Check what people choose.

        Raises:
            InvalidValueError: The tenant, the scopes, the name or the expiry are not acceptable.
        """
        for what, text in (("tenant", self.tenant), ("name", self.name)):
            if text is not None and not (0 < len(text) <= MAX_NAME_CHARS and text.isprintable()):
                raise InvalidValueError(
                    f"a {what} has 1 to {MAX_NAME_CHARS} printable characters", param=what
                )
        if not self.scopes:
            raise InvalidValueError("a key needs at least one scope", param="scope")
        if self.expires_at is None:
            return
        if not self.expires_at > self.created_at:
            raise InvalidValueError("the key would expire before it is made", param="expires")
        if self.expires_at > MAX_EXPIRES_AT:
            raise InvalidValueError("the key would expire behind the year 9999", param="expires")

    def opens_with(self, presented: str) -> bool:
        """Whether a text is the key; takes as long whatever the text."""
        return compare_digest(self.digest, key_digest(presented))

    def is_expired(self, now: float) -> bool:
        """Whether it is refused from a time on, in Unix seconds."""
        return self.expires_at is not None and now >= self.expires_at


def make_key(
    tenant: str,
    scopes: frozenset[Scope],
    *,
    name: str | None = None,
    lifetime_seconds: float | None = None,
) -> tuple[str, ApiKey]:
    """Draw a key.

    Args:
        tenant: Whose data it opens.
        scopes: What it allows.
        name: What people call it.
        lifetime_seconds: How long it is accepted; None is for ever.

    Returns:
        The key, which is to be shown once, and what is to be kept.

    Raises:
        InvalidValueError: An argument is not acceptable.
    """
    key_id = secrets.token_hex(_ID_BYTES)
    text = f"{_MARK}_{key_id}_{secrets.token_urlsafe(_SECRET_BYTES)}"
    now = time.time()
    expires_at = None if lifetime_seconds is None else now + lifetime_seconds
    return text, ApiKey(key_id, key_digest(text), tenant, scopes, name, now, expires_at)


def id_of(presented: str) -> str:
    """The part of a presented text that names a key; empty if it is not of a key's form."""
    mark, _, rest = presented.partition("_")
    return rest.partition("_")[0] if mark == _MARK else ""


def key_digest(presented: str) -> bytes:
    """What is kept of a key, 32 bytes."""
    return blake3(presented.encode("utf-8", "surrogatepass")).digest()
