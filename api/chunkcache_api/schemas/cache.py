"""The bodies of ``/v1/cache/clear`` and ``/v1/cache/gc``."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from chunkcache.cache_clearing import ClearedTier

ModelDigestPrefix = Annotated[str, Field(pattern=r"^[0-9a-fA-F]{8,64}$")]


class ClearRequest(BaseModel):
    """From where to drop what is cached."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tiers: Annotated[list[ClearedTier], Field(min_length=1, max_length=2)] = Field(
        default_factory=lambda: ["host"]
    )
    """``host`` (RAM), ``disk``, or both; what goes from disk goes from RAM too."""


class CollectRequest(BaseModel):
    """What to remove from the store beside what nothing needs any more."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    drop_models: Annotated[list[ModelDigestPrefix], Field(max_length=100)] = Field(
        default_factory=list
    )
    """Digests, or their beginnings, of models whose entries go."""
    dry_run: bool = False
    """Say what would go; keep it."""
