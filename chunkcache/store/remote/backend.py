"""What the remote tier asks of a client library: four calls on named byte strings.

Knows nothing of entries. A backend translates every failure of its library into
:class:`RemoteFailure`; no message of a library, which may quote a URL, gets any further.
"""

from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Protocol


class FailureKind(StrEnum):
    """Why a remote did not do what it was asked. Stable: these are label values of a metric."""

    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
    DENIED = "denied"
    """It refused the credentials, or what they may do."""
    FULL = "full"
    """It has no room."""
    ERROR = "error"
    """It answered something else."""


class RemoteFailure(Exception):
    """A call that failed; never leaves the store.

    Attributes:
        kind: Why.
    """

    def __init__(self, kind: FailureKind) -> None:
        super().__init__(kind.value)
        self.kind = kind


class DeclinedError(Exception):
    """An object was not read because the caller did not accept its size; never leaves the store."""


class Backend(Protocol):
    """Named byte strings somewhere else. Every method may be called from any thread.

    Each method raises :class:`RemoteFailure`, and ends of its own accord soon after the timeout that
    the backend was made with.
    """

    def get(self, name: str, accepts: Callable[[int], bool]) -> bytes | None:
        """Read an object.

        Args:
            name: Of the object.
            accepts: Asked with its size before any of it is read.

        Returns:
            All of it, or None where there is none.

        Raises:
            DeclinedError: ``accepts`` said no.
        """
        ...

    def size(self, name: str) -> int | None:
        """Bytes of an object, or None where there is none."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Write an object, whole or not at all, in place of an older one."""
        ...

    def delete(self, name: str) -> bool:
        """Remove an object; says whether there was one."""
        ...

    def names(self) -> Iterator[tuple[str, int]]:
        """All objects of the place, with their sizes."""
        ...

    def close(self) -> None:
        """Give connections back."""
        ...
