"""Every setting, in one place: typed, bounded, documented, read once.

A value comes from an argument, else from the environment, else from a TOML file, else it is the
default.
"""

import os
import tomllib
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings.sources import InitSettingsSource

from chunkcache.errors import InvalidValueError

CONFIG_VARIABLE: Final = "CHUNKCACHE_CONFIG"
"""Environment variable that names the TOML file."""
ENV_PREFIX: Final = "CHUNKCACHE_"


def default_cache_dir() -> Path:
    """The user's cache directory for chunkcache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "chunkcache"


class Settings(BaseSettings):
    """Settings, from arguments, environment variables ``CHUNKCACHE_<NAME>``, or a file."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
        use_attribute_docstrings=True,
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
    remote: str | None = Field(default=None, repr=False)
    """URL of entries that several machines share behind the disk (extra ``remote``):
    ``s3://bucket/prefix``, ``gs://``, ``az://``, ``file:///directory``, ``redis://host:port/db`` or
    ``valkey://``."""
    remote_timeout_seconds: float = Field(default=2.0, gt=0.0, le=60.0)
    """How long a request waits for the remote at most before it computes what it wants."""
    remote_max_object_bytes: int = Field(default=256 << 20, ge=1 << 10)
    """Larger entries are neither sent to the remote nor read from it."""
    cache_dir: Path = Field(default_factory=default_cache_dir)
    """Directory for what can be made again: converted models, remembered digests."""
    store_max_bytes: int = Field(default=64 << 30, ge=16 << 20)
    """Size in bytes that the store's data file may grow to."""
    disk_budget_bytes: int | None = Field(default=None, ge=0)
    """Bytes on disk that the keys and values of all chunks may take; beyond it the least valuable
    go. Documents always stay. None is no budget."""
    disk_eviction: Literal["value", "lru", "s3fifo"] = "value"
    """What leaves the disk where there is a budget; names as of ``host_eviction``."""
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
    target_kl: float = Field(default=0.02, gt=0.0, le=10.0)
    """Mean KL divergence in nats that the policy ``auto`` keeps to where a request names none."""
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
    kept_prompts_ratio: float = Field(default=0.5, ge=0.0, le=1.0)
    """Share of the KV pool that finished prompts may hold so that others begin with them; they yield
    to requests. 0 keeps none."""
    decode_tile_rows: int = Field(default=4, ge=1, le=64)
    """Rows of the fixed-shape decode tile: how many answers grow at once."""
    max_queued_requests: int = Field(default=64, ge=1)
    """Requests that may wait for the engine; more are refused."""
    max_queued_tokens: int = Field(default=262_144, ge=1)
    """Prompt tokens that may wait for the engine in all; beyond that, requests are refused."""
    max_requests_per_key: int = Field(default=32, ge=1)
    """Questions that one API key may have in flight."""
    stalled_stream_seconds: float = Field(default=60.0, gt=0.0, le=86_400.0)
    """A stream whose client reads nothing for so long is ended."""
    max_documents_per_request: int = Field(default=64, ge=1)
    """Documents that one request may name."""
    max_answer_tokens: int = Field(default=1024, ge=1)
    """Largest ``max_tokens`` of a request."""
    request_log_size: int = Field(default=256, ge=0, le=100_000)
    """Requests of which the service keeps an account, to be explained afterwards."""
    keys_file: Path | None = None
    """File of hashed API keys; None is ``keys.json`` in the store's directory, if it is there."""
    metrics_access: Literal["admin", "open"] = "admin"
    """Who may read ``/metrics`` where there are API keys: those of scope ``admin``, or everybody."""
    tenant_max_bytes: int | None = Field(default=None, ge=0)
    """Bytes that the documents of one tenant may take, keys and values included; None is no limit."""
    tracing: bool = False
    """Whether requests and their stages are sent as OpenTelemetry spans (extra ``otel``), without any
    text; the ``OTEL_`` environment variables say where to."""
    embedder: str = "demo"
    """What searches embed with: ``demo``, a sentence-transformers directory or hub id, or the URL in
    front of a service's ``/embeddings``."""
    embedder_model: str | None = None
    """The embedding model's name, for a service."""
    embedder_max_tokens: int = Field(default=256, ge=16)
    """Tokens, estimated from above, that an embedding service reads at once; longer chunks are
    embedded in windows."""
    index_factory: str | None = None
    """Which FAISS index: ``Flat``, ``HNSW<links>`` or ``IVF<cells>,Flat``; None is ``Flat``, and
    ``IVF1024,Flat`` above a million vectors."""
    reranker: str | None = None
    """What scores a search's best passages again: ``model`` is the served model over its kept
    entries; a cross-encoder's directory or hub id; or the URL in front of a service's ``/rerank``."""
    reranker_model: str | None = None
    """The reranking model's name, for a service."""
    rerank_depth: int = Field(default=20, ge=1, le=1_000)
    """How many passages are scored again."""
    mcp_access: Literal["query", "ingest", "all"] = "all"
    """Which tools ``chunkcache mcp`` offers: those that read, the one that writes, or all."""
    mcp_tenant: str = Field(default="default", min_length=1)
    """Whose documents ``chunkcache mcp`` offers, of a store that it opens itself."""
    verify_rate: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of the fused answers that are verified against the full prefill when nobody waits."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments, then the environment, then the file."""
        return init_settings, env_settings, InitSettingsSource(settings_cls, file_values())


def file_values() -> dict[str, Any]:
    """What the file that ``CHUNKCACHE_CONFIG`` names says; nothing where it names none.

    Raises:
        InvalidValueError: The file cannot be read, or is not TOML.
    """
    name = os.environ.get(CONFIG_VARIABLE)
    if not name:
        return {}
    try:
        with Path(name).expanduser().open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise InvalidValueError(f"{CONFIG_VARIABLE}: {name}: {reason}", param="config") from error
    except ValueError as error:
        raise InvalidValueError(f"{CONFIG_VARIABLE}: {name}: {error}", param="config") from error


def load_settings(**values: object) -> Settings:
    """Build settings from arguments, environment and file; arguments of None are left out.

    Raises:
        InvalidValueError: A value is out of range or unknown; the message names it.
    """
    try:
        return Settings(**{k: v for k, v in values.items() if v is not None})  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(p) for p in first["loc"])
        raise InvalidValueError(f"setting {name}: {first['msg']}", param=name) from error
