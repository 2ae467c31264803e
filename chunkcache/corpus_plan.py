"""What a corpus will take, before anything is computed: bytes, disk, load times, by codec.

Knows a model's geometry, not its weights. How fast entries are read is measured here, on an entry
of that geometry in memory; how fast the model prefills only a model can tell, so that figure is
the caller's, or left open.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch

from chunkcache.codecs import CODECS, Codec, LayerEncoder, codec_by_name
from chunkcache.documents import canonical_text
from chunkcache.entry import Entry, EntryShape
from chunkcache.errors import ChunkCacheError, InvalidValueError
from chunkcache.identity import EntryIdentity, ModelDigest, TenantNamespace
from chunkcache.model.spec import ModelSpec
from chunkcache.results import ItemFailure
from chunkcache.splitting import DocumentSplitter
from chunkcache.store.entry_format import decode_entry, encode_entry
from chunkcache.text_files import TextFile, TextItem

_PAGE_BYTES: Final = 4096
_NUM_READS: Final = 5
_NAMESPACE: Final = TenantNamespace(b"plan")


@dataclass(frozen=True)
class CorpusSize:
    """How much there is to cache.

    Attributes:
        num_documents: Documents; 0 where tokens alone were given.
        num_chunks: Distinct chunks.
        num_tokens: Their tokens.
        num_unreadable: Files that cannot be cached.
    """

    num_documents: int
    num_chunks: int
    num_tokens: int
    num_unreadable: int = 0


@dataclass(frozen=True)
class CodecPlan:
    """One codec's figures.

    Attributes:
        codec: Its name.
        bytes_per_token: Payload of one token.
        disk_bytes: Entries of the corpus, headers and page ends included.
        load_ms_per_1k_tokens: To read a thousand tokens that are in the page cache.
        break_even_prefill_tokens_per_s: A model that prefills faster than this gains nothing from
            reading its entries.
        load_speedup: How many times faster than prefilling reading is; None where that is open.
    """

    codec: str
    bytes_per_token: int
    disk_bytes: int
    load_ms_per_1k_tokens: float
    break_even_prefill_tokens_per_s: float
    load_speedup: float | None


@dataclass(frozen=True)
class CorpusPlan:
    """What a corpus will take.

    Attributes:
        corpus: Its size.
        compute_dtype: The model's.
        load_bytes_per_s: How fast entries are read, checks included.
        prefill_tokens_per_s: How fast the model prefills; None where that is open.
        prefill_s: To run the corpus through the model once, prefixes apart.
        codecs: By codec, those that this compute dtype admits.
    """

    corpus: CorpusSize
    compute_dtype: str
    load_bytes_per_s: float
    prefill_tokens_per_s: float | None
    prefill_s: float | None
    codecs: tuple[CodecPlan, ...]

    def to_dict(self) -> dict[str, Any]:
        """The command's JSON."""
        return asdict(self)


class CorpusMeter:
    """Counts a corpus file by file, cut as it would be when it is cached.

    Args:
        splitter: Cuts for the model's tokenizer.
    """

    def __init__(self, splitter: DocumentSplitter) -> None:
        self._splitter = splitter
        self._num_tokens_of: dict[bytes, int] = {}
        self._num_documents = self._num_unreadable = 0

    def add(self, item: TextFile | TextItem | ItemFailure) -> None:
        """Count a document; a chunk that was met before costs nothing."""
        document = item.read() if isinstance(item, TextFile) else item
        if isinstance(document, ItemFailure):
            self._num_unreadable += 1
            return
        try:
            text = canonical_text(document.text)
            chunks = self._splitter.split(text, _NAMESPACE, document.text_format)
        except ChunkCacheError:
            self._num_unreadable += 1
            return
        self._num_documents += 1
        self._num_tokens_of |= {chunk.chunk_id: len(chunk.token_ids) for chunk in chunks}

    def size(self) -> CorpusSize:
        """What was counted."""
        return CorpusSize(
            num_documents=self._num_documents,
            num_chunks=len(self._num_tokens_of),
            num_tokens=sum(self._num_tokens_of.values()),
            num_unreadable=self._num_unreadable,
        )


def plan_corpus(
    spec: ModelSpec,
    compute_dtype: torch.dtype,
    corpus: CorpusSize,
    *,
    prefill_tokens_per_s: float | None = None,
) -> CorpusPlan:
    """Plan a corpus under every codec that the compute dtype admits.

    Args:
        spec: The model's geometry.
        compute_dtype: What it would be loaded in.
        corpus: How much there is.
        prefill_tokens_per_s: How fast the model prefills, if that is known.

    Raises:
        InvalidValueError: The corpus holds nothing.
    """
    if corpus.num_chunks < 1 or corpus.num_tokens < corpus.num_chunks:
        raise InvalidValueError("there is nothing to cache", param="corpus")
    raw = codec_by_name("raw", compute_dtype)
    num_tokens = max(1, corpus.num_tokens // corpus.num_chunks)
    overhead_bytes, load_bytes_per_s = _measure(spec, raw, num_tokens)
    plans = []
    for codec in CODECS.values():
        if not _admits(codec, compute_dtype):
            continue
        bytes_per_token = codec.bytes_per_token(spec.num_layers, spec.num_kv_heads, spec.head_dim)
        chunk_bytes = num_tokens * bytes_per_token + overhead_bytes
        pages = -(-chunk_bytes // _PAGE_BYTES)
        load_tokens_per_s = load_bytes_per_s / bytes_per_token
        plans.append(
            CodecPlan(
                codec=codec.name,
                bytes_per_token=bytes_per_token,
                disk_bytes=pages * _PAGE_BYTES * corpus.num_chunks,
                load_ms_per_1k_tokens=1e6 / load_tokens_per_s,
                break_even_prefill_tokens_per_s=load_tokens_per_s,
                load_speedup=load_tokens_per_s / prefill_tokens_per_s
                if prefill_tokens_per_s
                else None,
            )
        )
    return CorpusPlan(
        corpus=corpus,
        compute_dtype=str(compute_dtype).removeprefix("torch."),
        load_bytes_per_s=load_bytes_per_s,
        prefill_tokens_per_s=prefill_tokens_per_s,
        prefill_s=corpus.num_tokens / prefill_tokens_per_s if prefill_tokens_per_s else None,
        codecs=tuple(plans),
    )


def _admits(codec: Codec, compute_dtype: torch.dtype) -> bool:
    try:
        return codec_by_name(codec.name, compute_dtype) is codec
    except InvalidValueError:
        return False


def _measure(spec: ModelSpec, codec: Codec, num_tokens: int) -> tuple[int, float]:
    """Bytes of an entry beside its payload, and bytes per second of reading one."""
    identity = EntryIdentity(
        ModelDigest(bytes(32)), _NAMESPACE, "alone", (), codec.name, (1 << 16,) * num_tokens
    )
    shape = EntryShape(spec.num_layers, num_tokens, spec.num_kv_heads, spec.head_dim)
    encoder = LayerEncoder(codec, shape)
    zeros = torch.zeros(shape.axes[1:])
    for layer in range(shape.num_layers):
        encoder.write(layer, zeros, zeros)
    entry = Entry(identity, identity.key(), encoder.k, encoder.v, encoder.scales)
    stored = memoryview(encode_entry(entry))
    seconds = min(_timed(lambda: decode_entry(stored, identity)) for _ in range(_NUM_READS))
    return len(stored) - entry.num_bytes, entry.num_bytes / seconds


def _timed(task: Callable[[], object]) -> float:
    started = time.perf_counter()
    task()
    return time.perf_counter() - started
