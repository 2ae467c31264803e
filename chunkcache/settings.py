"""Every setting of the core, in one place: typed, bounded, documented, read once."""

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from chunkcache.errors import InvalidValueError


def default_cache_dir() -> Path:
    """The user's cache directory for chunkcache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "chunkcache"


class Settings(BaseSettings):
    """Settings, from arguments or from environment variables ``CHUNKCACHE_<NAME>``."""

    model_config = SettingsConfigDict(
        env_prefix="CHUNKCACHE_", frozen=True, extra="forbid", protected_namespaces=()
    )

    model: str = "demo"
    """Model to serve: ``demo``, a directory, a ``.gguf`` file, or a hub id."""
    revision: str | None = None
    """Hub revision of the model, where it comes from a hub."""
    trust_remote_code: bool = False
    """Whether Python code that comes with a model may be run; read it first. For models whose
    configuration class derives from a supported family's; others are refused all the same."""
    thinking: bool = False
    """Whether a model whose chat template has a switch for it thinks before it answers."""
    adapter: str | None = None
    """LoRA adapter that is merged into the model's weights: a PEFT directory, or a hub id."""
    device: str = "cpu"
    """Torch device that the model and its pages live on."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Compute dtype; ``auto`` is float32 on the CPU and bfloat16 elsewhere."""
    quantisation: Literal["none", "int8"] = "none"
    """``int8`` keeps the model's matrices as int8, for faster decoding on the CPU."""
    store: Path = Path("chunkcache.store")
    """Directory of the store; made if it is not there."""
    cache_dir: Path = Field(default_factory=default_cache_dir)
    """Directory for what can be made again: converted models, remembered digests."""
    store_max_bytes: int = Field(default=64 << 30, ge=16 << 20)
    """Size in bytes that the store's data file may grow to."""
    read_only: bool = False
    """Open the store for reading alone: documents cannot be changed, what misses is not stored."""
    host_tier_bytes: int = Field(default=1 << 30, ge=0)
    """Bytes of RAM for entries in front of the disk."""
    host_eviction: Literal["value", "lru", "s3fifo"] = "value"
    """What leaves a full RAM tier: ``value`` weighs saved compute by learned reuse."""
    max_pinned_ratio: float = Field(default=0.5, ge=0.0, le=1.0)
    """Share of the RAM tier that pins may hold."""
    template_tier_bytes: int = Field(default=256 << 20, ge=0)
    """Bytes of RAM for entries of prompt openings and other template text."""
    codec: Literal["raw", "bf16", "int8", "fp8", "raw32", "raw16"] = "bf16"
    """How keys and values are stored: ``raw`` is the compute dtype, ``bf16`` halves float32, ``int8``
    and ``fp8`` halve that again."""
    preparation: str = "preamble"
    """What a chunk is prefilled behind: ``alone``, ``sink(k)``, ``system``, ``preamble`` or
    ``neighbours(n)``."""
    system: str | None = None
    """System prompt; None is the built-in one."""
    policy: str = "hybrid"
    """Recompute policy where a request names none."""
    recompute_ratio: float = Field(default=0.15, ge=0.0, le=1.0)
    """Share of a prompt's chunk tokens that policies with a ratio recompute."""
    chunk_tokens: int = Field(default=256, ge=16, le=4096)
    """Largest size of a chunk, in the model's tokens."""
    min_fused_context_tokens: int = Field(default=1024, ge=0)
    """Prompts with fewer chunk tokens run in full: fusion would not pay."""
    min_mean_chunk_tokens: int = Field(default=64, ge=0)
    """Prompts whose chunks are smaller than this on average run in full."""
    max_fused_ratio: float = Field(default=0.6, ge=0.0, le=1.0)
    """At this recompute ratio or above, a full prefill runs instead."""
    page_tokens: int = Field(default=16, ge=1, le=1024)
    """Token slots per page of the KV pool."""
    pool_tokens: int = Field(default=32768, ge=16)
    """Token slots of the KV pool, shared by the requests in flight."""
    decode_tile_rows: int = Field(default=4, ge=1, le=64)
    """Rows of the fixed-shape decode tile: how many answers grow at once."""
    max_queued_requests: int = Field(default=64, ge=1)
    """Requests that may wait for the engine; more are refused."""
    max_documents_per_request: int = Field(default=64, ge=1)
    """Documents that one request may name."""
    max_answer_tokens: int = Field(default=1024, ge=1)
    """Largest ``max_tokens`` of a request."""
    request_log_size: int = Field(default=256, ge=0, le=100_000)
    """Requests of which the service keeps an account, to be explained afterwards."""
    verify_rate: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of the fused answers that are verified against the full prefill when nobody waits."""


def load_settings(**values: object) -> Settings:
    """Build settings from arguments and the environment; arguments of None are left out.

    Raises:
        InvalidValueError: A value is out of range or unknown; the message names it.
    """
    try:
        return Settings(**{k: v for k, v in values.items() if v is not None})  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(p) for p in first["loc"])
        raise InvalidValueError(f"setting {name}: {first['msg']}", param=name) from error
