"""Options that several commands share; the other settings come from ``CHUNKCACHE_*`` variables.

An option that is not given is None, so that the settings' own default and environment count.
"""

from pathlib import Path
from typing import Annotated

import typer

StoreOption = Annotated[
    Path | None,
    typer.Option(
        "--store",
        envvar="CHUNKCACHE_STORE",
        help="Directory of the store; made if it is not there.",
        show_default="./chunkcache.store",
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        envvar="CHUNKCACHE_MODEL",
        metavar="NAME",
        help="Model: 'demo', a directory, a .gguf file or a hub id.",
        show_default="demo",
    ),
]
AdapterOption = Annotated[
    str | None,
    typer.Option(
        "--adapter",
        envvar="CHUNKCACHE_ADAPTER",
        metavar="NAME",
        help="LoRA adapter to merge into the model: a PEFT directory or a hub id. "
        "Part of an entry's key, by its content.",
        show_default="none",
    ),
]
QuantisationOption = Annotated[
    str | None,
    typer.Option(
        "--quantisation",
        envvar="CHUNKCACHE_QUANTISATION",
        metavar="KIND",
        help="int8 keeps the matrices as int8: faster decoding on the CPU. Part of the key too.",
        show_default="none",
    ),
]
ReadOnlyOption = Annotated[
    bool | None,
    typer.Option(
        "--read-only",
        envvar="CHUNKCACHE_READ_ONLY",
        help="Open the store for reading alone: nothing in it changes, what misses is computed "
        "and not stored.",
        show_default=False,
    ),
]
PreparationOption = Annotated[
    str | None,
    typer.Option(
        "--preparation",
        envvar="CHUNKCACHE_PREPARATION",
        metavar="KIND",
        help="What chunks are prefilled behind: alone, sink(k), system, preamble, or "
        "neighbours(n): their nearest chunks, found by the embedder. "
        "Part of an entry's key: ask with what was pre-cached with.",
        show_default="preamble",
    ),
]
CodecOption = Annotated[
    str | None,
    typer.Option(
        "--codec",
        envvar="CHUNKCACHE_CODEC",
        metavar="NAME",
        help="How entries are stored: bf16 (half of float32), raw (exact), int8 or fp8 (half of bf16, "
        "a little less close; docs/codecs.md). Part of the key too.",
        show_default="bf16",
    ),
]
ChunkTokensOption = Annotated[
    int | None,
    typer.Option(
        "--chunk-tokens",
        envvar="CHUNKCACHE_CHUNK_TOKENS",
        help="Largest size of a chunk in tokens. Documents cut otherwise are cut again.",
        show_default="256",
    ),
]
StoreMaxBytesOption = Annotated[
    int | None,
    typer.Option(
        "--store-max-bytes",
        envvar="CHUNKCACHE_STORE_MAX_BYTES",
        help="Size in bytes that the store may grow to.",
        show_default="64 GiB",
    ),
]
RemoteOption = Annotated[
    str | None,
    typer.Option(
        "--remote",
        envvar="CHUNKCACHE_REMOTE",
        metavar="URL",
        help="Entries that several machines share: s3://bucket/prefix, gs://, az://, "
        "file:///directory, redis://host:port/db or valkey://. Credentials of object stores come "
        "from the environment.",
        show_default="none",
    ),
]
HostTierBytesOption = Annotated[
    int | None,
    typer.Option(
        "--host-tier-bytes",
        envvar="CHUNKCACHE_HOST_TIER_BYTES",
        help="Bytes of RAM for entries in front of the disk.",
        show_default="1 GiB",
    ),
]
PolicyOption = Annotated[
    str | None,
    typer.Option(
        "--policy",
        envvar="CHUNKCACHE_POLICY",
        metavar="NAME",
        help="Which cached tokens are recomputed: hybrid, auto (as many as --target takes), query, "
        "deviation, shift, lego, random, none, or full (the exact answer).",
        show_default="hybrid",
    ),
]
RatioOption = Annotated[
    float | None,
    typer.Option(
        "--ratio",
        envvar="CHUNKCACHE_RECOMPUTE_RATIO",
        help="Share of the cached tokens that the policy recomputes, 0 to 1.",
        show_default="0.15",
    ),
]
TargetOption = Annotated[
    float | None,
    typer.Option(
        "--target",
        envvar="CHUNKCACHE_TARGET_KL",
        metavar="KL",
        help="How close the policy auto keeps to the full prefill: mean KL divergence of the "
        "answer in nats, met by nine requests in ten.",
        show_default="0.02",
    ),
]
SystemOption = Annotated[
    str | None,
    typer.Option(
        "--system",
        envvar="CHUNKCACHE_SYSTEM",
        metavar="TEXT",
        help="System prompt.",
        show_default="built in",
    ),
]
KeysFileOption = Annotated[
    Path | None,
    typer.Option(
        "--keys-file",
        envvar="CHUNKCACHE_KEYS_FILE",
        help="File of hashed API keys.",
        show_default="keys.json in the store",
    ),
]
JsonOption = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON object on stdout, and nothing else there."),
]
