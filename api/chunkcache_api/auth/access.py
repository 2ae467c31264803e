"""Who may call which route: the one table of scopes, and the check in front of every route."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from fastapi import Request

from chunkcache.chunk_cache import DEFAULT_TENANT
from chunkcache_api.auth.api_key import SCOPES, Scope
from chunkcache_api.auth.key_ring import KeyRing
from chunkcache_api.errors import InsufficientScopeError, InvalidApiKeyError

ANYBODY: Final[frozenset[Scope]] = frozenset()
"""No key is needed."""
ANY_KEY: Final = frozenset(SCOPES)
READERS: Final[frozenset[Scope]] = frozenset({"query", "ingest"})
ASKERS: Final[frozenset[Scope]] = frozenset({"query"})
WRITERS: Final[frozenset[Scope]] = frozenset({"ingest"})
ADMINS: Final[frozenset[Scope]] = frozenset({"admin"})

METRICS: Final = ("GET", "/metrics")
ROUTE_SCOPES: Final[Mapping[tuple[str, str], frozenset[Scope]]] = {
    ("GET", "/"): ANYBODY,
    ("GET", "/web/{name}"): ANYBODY,
    ("GET", "/livez"): ANYBODY,
    ("GET", "/readyz"): ANYBODY,
    ("GET", "/health"): ANYBODY,
    ("GET", "/version"): ANYBODY,
    ("GET", "/openapi.json"): ANYBODY,
    METRICS: ADMINS,
    ("POST", "/v1/query"): ASKERS,
    ("POST", "/v1/chat/completions"): ASKERS,
    ("POST", "/v1/responses"): ASKERS,
    ("POST", "/v1/search"): ASKERS,
    ("GET", "/v1/requests/{id}"): ASKERS,
    ("GET", "/v1/models"): ANY_KEY,
    ("GET", "/v1/models/{model:opaque}"): ANY_KEY,
    ("POST", "/v1/models/reload"): ADMINS,
    ("GET", "/v1/cache/stats"): ADMINS,
    ("POST", "/v1/cache/clear"): ADMINS,
    ("POST", "/v1/cache/gc"): ADMINS,
    ("POST", "/v1/cache/pins"): ADMINS,
    ("DELETE", "/v1/cache/pins"): ADMINS,
    ("POST", "/v1/files"): WRITERS,
    ("GET", "/v1/files"): READERS,
    ("GET", "/v1/files/{id:opaque}/content"): READERS,
    ("GET", "/v1/files/{id:opaque}"): READERS,
    ("DELETE", "/v1/files/{id:opaque}"): WRITERS,
    ("POST", "/v1/vector_stores"): WRITERS,
    ("GET", "/v1/vector_stores"): READERS,
    ("GET", "/v1/vector_stores/{vector_store_id}"): READERS,
    ("POST", "/v1/vector_stores/{vector_store_id}"): WRITERS,
    ("DELETE", "/v1/vector_stores/{vector_store_id}"): WRITERS,
    ("POST", "/v1/vector_stores/{vector_store_id}/search"): ASKERS,
    ("POST", "/v1/vector_stores/{vector_store_id}/files"): WRITERS,
    ("GET", "/v1/vector_stores/{vector_store_id}/files"): READERS,
    ("GET", "/v1/vector_stores/{vector_store_id}/files/{id:opaque}/content"): READERS,
    ("GET", "/v1/vector_stores/{vector_store_id}/files/{id:opaque}"): READERS,
    ("POST", "/v1/vector_stores/{vector_store_id}/files/{id:opaque}"): WRITERS,
    ("DELETE", "/v1/vector_stores/{vector_store_id}/files/{id:opaque}"): WRITERS,
    ("POST", "/v1/precache"): WRITERS,
    ("GET", "/v1/jobs"): WRITERS,
    ("GET", "/v1/jobs/{id}"): WRITERS,
    ("POST", "/v1/jobs/{id}/cancel"): WRITERS,
    ("POST", "/v1/documents"): WRITERS,
    ("POST", "/v1/documents/lookup"): READERS,
    ("GET", "/v1/documents"): READERS,
    ("GET", "/v1/documents/{id:opaque}"): READERS,
    ("PUT", "/v1/documents/{id:opaque}"): WRITERS,
    ("DELETE", "/v1/documents/{id:opaque}"): WRITERS,
}
"""Every route, and the scopes of which a key needs one. A route that is not here is refused."""


@dataclass(frozen=True)
class Principal:
    """On whose behalf a request comes.

    Attributes:
        tenant: Whose data it sees.
        key_id: Its key; None on a server without keys.
    """

    tenant: str
    key_id: str | None


class Gatekeeper:
    """Lets a request through, or refuses it. Made for each application.

    Args:
        keys: The keys in force.
        metrics_are_open: Whether ``/metrics`` needs no key.
    """

    def __init__(self, keys: KeyRing, *, metrics_are_open: bool = False) -> None:
        self.keys = keys
        self._scopes = {**ROUTE_SCOPES, **({METRICS: ANYBODY} if metrics_are_open else {})}

    def admit(self, method: str, path: str, authorization: str | None) -> Principal:
        """On whose behalf a request comes.

        Args:
            method: Its method.
            path: The path of its route, as the route states it.
            authorization: Its ``Authorization`` header.

        Raises:
            InvalidApiKeyError: It needs a key and has none that is valid.
            InsufficientScopeError: Its key does not allow this.
        """
        if self.keys.is_open:
            return Principal(DEFAULT_TENANT, None)
        needed = self._scopes.get((method, path))
        if needed == ANYBODY:
            return Principal(DEFAULT_TENANT, None)
        key = self.keys.identify(_bearer(authorization))
        if needed is None or not needed & key.scopes:
            self.keys.count_refusal("scope")
            wanted = " or ".join(sorted(needed or ())) or "none that there is"
            raise InsufficientScopeError(f"this needs a key of scope {wanted}")
        return Principal(key.tenant, key.key_id)


async def check_access(request: Request) -> None:
    """In front of every route: stands before its arguments are looked at, and before its body.

    Raises:
        InvalidApiKeyError: As :meth:`Gatekeeper.admit` does.
        InsufficientScopeError: Likewise.
    """
    given = request.headers.getlist("authorization")
    if len(given) > 1:
        raise InvalidApiKeyError("there is more than one authorization header")
    gatekeeper: Gatekeeper = request.app.state.gatekeeper
    request.state.principal = gatekeeper.admit(
        request.method, request.scope["route"].path, given[0] if given else None
    )


def _bearer(authorization: str | None) -> str | None:
    scheme, _, key = (authorization or "").strip().partition(" ")
    return key.strip() if scheme.lower() == "bearer" and key.strip() else None
