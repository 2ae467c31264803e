"""What the store's tests share: small entries, small documents, an open environment."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from chunkcache.codecs import CODECS, LayerEncoder
from chunkcache.documents import Chunk, Document
from chunkcache.entry import Entry, EntryShape
from chunkcache.identity import (
    EntryIdentity,
    ModelDigest,
    TenantNamespace,
    TokenizerDigest,
    chunk_id,
)
from chunkcache.store.disk import DiskTier
from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.host import HostTier
from chunkcache.store.stack import TierStack

MODEL = ModelDigest(b"m" * 32)
NAMESPACE = TenantNamespace(b"n" * 32)
TOKENIZER = TokenizerDigest(b"t" * 32)

MakeEntry = Callable[..., Entry]
MakeDocument = Callable[..., Document]


@pytest.fixture
def make_entry() -> MakeEntry:
    """Build entries: the seed decides token ids and numbers."""

    def make(
        seed: int = 0,
        *,
        num_tokens: int = 8,
        codec: str = "bf16",
        namespace: TenantNamespace = NAMESPACE,
        token_ids: tuple[int, ...] | None = None,
        num_layers: int = 3,
        num_kv_heads: int = 2,
        head_dim: int = 16,
    ) -> Entry:
        generator = torch.Generator().manual_seed(seed)
        ids = token_ids or tuple(seed * 1_000 + i for i in range(num_tokens))
        identity = EntryIdentity(
            model=MODEL,
            namespace=namespace,
            preparation="alone",
            prefix_ids=(),
            codec=codec,
            token_ids=ids,
        )
        shape = EntryShape(num_layers, len(ids), num_kv_heads, head_dim)
        encoder = LayerEncoder(CODECS[codec], shape)
        k, v = (torch.randn(shape.axes, generator=generator) for _ in range(2))
        for layer in range(num_layers):
            encoder.write(layer, k[layer], v[layer])
        return Entry(identity, identity.key(), encoder.k, encoder.v, encoder.scales)

    return make


@pytest.fixture
def make_document() -> MakeDocument:
    """Build documents of one chunk per word; a word's characters are its token ids."""

    def make(
        document_id: str = "d",
        text: str = "alpha beta",
        *,
        metadata: dict | None = None,
        namespace: TenantNamespace = NAMESPACE,
        tokenizer: TokenizerDigest = TOKENIZER,
        chunking: str = "words",
    ) -> Document:
        chunks, start = [], 0
        for word in text.split(" "):
            ids = tuple(map(ord, word))
            end = start + len(word)
            chunks.append(Chunk(chunk_id(namespace, tokenizer, ids), start, end, ids))
            start = end + 1
        return Document(
            document_id=document_id,
            text=text,
            metadata=metadata or {},
            chunks=tuple(chunks),
            tokenizer=tokenizer,
            chunking=chunking,
        )

    return make


@pytest.fixture
def env(tmp_path: Path) -> Iterator[StoreEnvironment]:
    """An open, empty store."""
    with StoreEnvironment.open(tmp_path / "store", max_bytes=1 << 30) as environment:
        yield environment


HOST_BYTES = 1 << 20


@pytest.fixture
def host() -> HostTier:
    return HostTier(HOST_BYTES)


@pytest.fixture
def stack(env: StoreEnvironment, host: HostTier) -> Iterator[TierStack]:
    stack = TierStack(host, DiskTier(env))
    yield stack
    stats = stack.stats()
    assert stats.leases_open == 0
    assert stats.lookups == sum(stats.hits.values()) + sum(stats.misses.values())
    stack.check_integrity()
    stack.close()
