"""How many bytes one tenant's documents may take. Knows neither stores nor models."""

from dataclasses import dataclass

from chunkcache.errors import QuotaExceededError


@dataclass(frozen=True)
class DocumentSize:
    """What documents take, however many of their entries are there at the moment.

    Attributes:
        num_tokens: Tokens of their chunks; a chunk of two documents counts twice, so that a size
            tells nothing of what else is stored.
        record_bytes: Bytes of their text, metadata and cuts, as stored.
    """

    num_tokens: int = 0
    record_bytes: int = 0

    def __add__(self, other: "DocumentSize") -> "DocumentSize":
        return DocumentSize(
            self.num_tokens + other.num_tokens, self.record_bytes + other.record_bytes
        )

    def __sub__(self, other: "DocumentSize") -> "DocumentSize":
        return DocumentSize(
            self.num_tokens - other.num_tokens, self.record_bytes - other.record_bytes
        )


@dataclass(frozen=True)
class TenantQuota:
    """A tenant's limit.

    Attributes:
        max_bytes: Bytes that its documents may take.
        bytes_per_token: Bytes of one token's keys and values, as stored.
    """

    max_bytes: int
    bytes_per_token: int

    def bytes_of(self, size: DocumentSize) -> int:
        """Bytes that documents take once all of their chunks are prefilled."""
        return size.record_bytes + size.num_tokens * self.bytes_per_token

    def check(self, before: DocumentSize, after: DocumentSize) -> None:
        """Whether a change may be made. What takes no more than before always may.

        Raises:
            QuotaExceededError: The documents would take more than allowed.
        """
        num_bytes = self.bytes_of(after)
        if num_bytes > self.max_bytes and num_bytes > self.bytes_of(before):
            raise QuotaExceededError(
                f"the documents would take {num_bytes} bytes, keys and values included; "
                f"{self.max_bytes} are allowed"
            )
