"""Warm loads: entries from the disk tier's page cache to placed pages, codec beside codec.

The product's own path (tier stack, then ``place_entry``), with a host tier of no bytes, so that
every load reads the store. Entries hold random numbers: what they hold changes no time, and no
model has to run. Codecs take turns with each other and with memory copies, and medians count, so
that a machine that slows down slows all of them.
"""

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from chunkcache.codecs import Codec, LayerEncoder, codec_by_name
from chunkcache.entry import Entry, EntryShape
from chunkcache.fusion.place import place_entry
from chunkcache.fusion.recompute import SequenceKV
from chunkcache.identity import EntryIdentity, TenantNamespace
from chunkcache.model.runner import ModelRunner
from chunkcache.model_opening import load_configured_model
from chunkcache.pages import PagePool
from chunkcache.settings import Settings
from chunkcache.store.disk import DiskTier
from chunkcache.store.entry_format import encode_entry
from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.host import HostTier
from chunkcache.store.stack import TierStack

Progress = Callable[[str], None]

COPY_BYTES = 64 << 20
"""Larger than caches, so that a copy of it is of memory."""
_NAMESPACE = TenantNamespace(b"eval store".ljust(32))


@dataclass(frozen=True)
class CodecLoad:
    """One codec; times are medians over repeats.

    Attributes:
        codec: Its name as it was asked for.
        bytes_per_token: Payload of one token, scales included.
        stored_bytes_per_token: What an entry of this chunk size takes in the store, header
            included.
        load_ms: Finding and checking one entry.
        place_ms: Placing it.
        gb_s: Payload bytes loaded and placed per second, in 10**9.
        tokens_s: Tokens loaded and placed per second.
        memcpy_share: ``gb_s`` over that of one thread's memcpy.
    """

    codec: str
    bytes_per_token: int
    stored_bytes_per_token: float
    load_ms: float
    place_ms: float
    gb_s: float
    tokens_s: float
    memcpy_share: float


@dataclass(frozen=True)
class LoadReport:
    """All codecs.

    Attributes:
        model: Model whose geometry the entries have.
        dtype: Type of the pages.
        threads: Threads of torch.
        chunk_tokens: Tokens of an entry.
        num_chunks: Entries of a prompt.
        memcpy_gb_s: One thread copying memory with memcpy, bytes copied per second.
        copy_gb_s: All threads copying memory with torch.
        codecs: In the order asked for.
    """

    model: str
    dtype: str
    threads: int
    chunk_tokens: int
    num_chunks: int
    memcpy_gb_s: float
    copy_gb_s: float
    codecs: tuple[CodecLoad, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)


def measure_loads(
    settings: Settings,
    codecs: Sequence[str],
    *,
    num_chunks: int = 16,
    repeats: int = 9,
    progress: Progress = lambda line: None,
) -> LoadReport:
    """Measure.

    Args:
        settings: Model, device, chunk size and page size; the store is a temporary one.
        codecs: Names, each once.
        num_chunks: Entries that one measurement loads and places.
        repeats: Measurements of each codec, of which the medians count.
        progress: Told what is going on.

    Raises:
        InvalidValueError: An unknown codec.
        ModelError: The model cannot be used.
        StoreError: The store failed.
    """
    runner = load_configured_model(settings, progress).runner
    chosen = {name: codec_by_name(name, runner.dtype) for name in codecs}
    spec = runner.spec
    shape = EntryShape(spec.num_layers, settings.chunk_tokens, spec.num_kv_heads, spec.head_dim)
    with tempfile.TemporaryDirectory(prefix="chunkcache-eval-") as folder:
        path = Path(folder) / "store"
        with StoreEnvironment.open(path, max_bytes=settings.store_max_bytes) as env:
            progress(f"writing {num_chunks} entries of {settings.chunk_tokens} tokens per codec")
            identities = {
                name: _write(DiskTier(env), codec, shape, runner, num_chunks)
                for name, codec in chosen.items()
            }
            bench = _Bench(runner, TierStack(HostTier(0), DiskTier(env)), num_chunks, settings)
            rounds = defaultdict[str, list[tuple[float, float]]](list)
            copies = [_copy_rates()]
            for index in range(repeats + 1):
                for name, wanted in identities.items():
                    rounds[name].append(bench.run(wanted))
                copies.append(_copy_rates())
                progress(f"round {index} of {repeats}" if index else "warmed up")
            stored = {name: _stored_bytes(env, wanted[0]) for name, wanted in identities.items()}
    memcpy, copy = (statistics.median(rates) for rates in zip(*copies, strict=True))
    return LoadReport(
        model=runner.name,
        dtype=str(runner.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        chunk_tokens=settings.chunk_tokens,
        num_chunks=num_chunks,
        memcpy_gb_s=memcpy,
        copy_gb_s=copy,
        codecs=tuple(
            _summary(name, codec, shape, rounds[name][1:], num_chunks, stored[name], memcpy)
            for name, codec in chosen.items()
        ),
    )


class _Bench:
    """Loads entries and places them one behind the other, in pages of one sequence."""

    def __init__(
        self, runner: ModelRunner, stack: TierStack, num_chunks: int, settings: Settings
    ) -> None:
        self._stack = stack
        self._chunk_tokens = settings.chunk_tokens
        num_tokens = num_chunks * settings.chunk_tokens
        pool = PagePool(
            runner.spec,
            num_tokens=num_tokens + settings.page_tokens,
            page_tokens=settings.page_tokens,
            dtype=runner.dtype,
            device=runner.device,
        )
        pages = pool.allocate(num_tokens)
        assert pages is not None
        self._sequence = SequenceKV.over(runner, pool.k, pool.v, pages.slots)

    def run(self, identities: Sequence[EntryIdentity]) -> tuple[float, float]:
        """Seconds of finding all entries, and of placing them."""
        load_s = place_s = 0.0
        with torch.inference_mode():
            for index, identity in enumerate(identities):
                began = time.perf_counter()
                lease = self._stack.load_or_prefill(identity, _is_missing, may_lend=True)
                loaded = time.perf_counter()
                place_entry(self._sequence, lease.entry, index * self._chunk_tokens)
                place_s += time.perf_counter() - loaded
                lease.release()
                load_s += loaded - began
        return load_s, place_s


def _is_missing() -> Entry:
    raise AssertionError("an entry that was written a moment ago is not there")


def _write(
    disk: DiskTier, codec: Codec, shape: EntryShape, runner: ModelRunner, num_chunks: int
) -> list[EntryIdentity]:
    """Store entries of random numbers, one of whose key channels is large, as real ones are."""
    source = torch.Generator().manual_seed(0)
    identities: list[EntryIdentity] = []
    rows = shape.axes[1:]
    for index in range(num_chunks):
        token_ids = tuple(range(index, index + shape.num_tokens))
        identity = EntryIdentity(runner.digest, _NAMESPACE, "alone", (), codec.name, token_ids)
        encoder = LayerEncoder(codec, shape)
        for layer in range(shape.num_layers):
            k = torch.randn(rows, generator=source)
            k[..., 0] *= 10
            encoder.write(layer, k, torch.randn(rows, generator=source))
        disk.put(Entry(identity, identity.key(), encoder.k, encoder.v, encoder.scales))
        identities.append(identity)
    return identities


def _stored_bytes(env: StoreEnvironment, identity: EntryIdentity) -> int:
    entry = DiskTier(env).get(identity)
    assert isinstance(entry, Entry)
    return len(encode_entry(entry))


def _summary(
    name: str,
    codec: Codec,
    shape: EntryShape,
    rounds: Sequence[tuple[float, float]],
    num_chunks: int,
    stored_bytes: int,
    memcpy_gb_s: float,
) -> CodecLoad:
    load_s, place_s = (statistics.median(times) for times in zip(*rounds, strict=True))
    total_s = statistics.median(sum(times) for times in rounds)
    num_tokens = num_chunks * shape.num_tokens
    bytes_per_token = codec.bytes_per_token(shape.num_layers, shape.num_kv_heads, shape.head_dim)
    gb_s = bytes_per_token * num_tokens / total_s / 1e9
    return CodecLoad(
        codec=name,
        bytes_per_token=bytes_per_token,
        stored_bytes_per_token=stored_bytes / shape.num_tokens,
        load_ms=load_s / num_chunks * 1e3,
        place_ms=place_s / num_chunks * 1e3,
        gb_s=gb_s,
        tokens_s=num_tokens / total_s,
        memcpy_share=gb_s / memcpy_gb_s,
    )


def _copy_rates() -> tuple[float, float]:
    """Bytes copied per second, in 10**9: by one memcpy, and by torch with all its threads."""
    source = np.ones(COPY_BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    tensors = torch.from_numpy(source), torch.from_numpy(target)
    began = time.perf_counter()
    np.copyto(target, source)
    one = time.perf_counter() - began
    began = time.perf_counter()
    tensors[1].copy_(tensors[0])
    return COPY_BYTES / one / 1e9, COPY_BYTES / (time.perf_counter() - began) / 1e9
