"""Isolated prefill: chunks, alone or behind a fixed prefix, to the keys and values of entries.

One fixed routine whoever asks, so that an entry computed again has the same bits: whatever other
chunks run beside it, and on however many threads. It works on scratch memory of its own and knows
nothing of stores.
"""

from collections.abc import Generator, Sequence

import torch

from chunkcache.codecs import Codec, LayerEncoder
from chunkcache.entry import Entry, EntryShape
from chunkcache.fusion.cost import CostMeter
from chunkcache.fusion.recompute import (
    Hook,
    LayerRows,
    RowsToRun,
    SequenceKV,
    run_packed,
)
from chunkcache.identity import EntryIdentity
from chunkcache.model.product_bits import LEAST_ROWS
from chunkcache.model.runner import ModelRunner

MAX_PACK_ROWS = 1024
"""Rows of a pack, unless one chunk has more. Products of 240 rows reach three quarters of the speed
of products of 800 (``docs/experiments.md``); beyond that there is nothing more to gain."""

_ROUND_UP = 256
"""Scratch memory grows in steps of this many tokens."""


class IsolatedPrefill:
    """Computes entries.

    The keys and values of the most recent prefix stay in the scratch memory, so that a corpus
    prepared behind one prefix pays for it once. For a rotation that depends on the length they are
    not reused: a prefix's rotated keys would differ from chunk to chunk.

    A prefix runs as a whole or not at all, however much it shares with the one before: rows run in
    other portions would have other bits.

    Attributes:
        num_rows: Rows run so far, those of prefixes included.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.num_rows = 0
        self._runner = runner
        self._prefix_ids: tuple[int, ...] = ()
        self._k, self._v = self._allocate(0)

    def num_packed(self, identities: Sequence[EntryIdentity]) -> int:
        """How many of the first entries may be computed at once, at least one.

        They stand behind one prefix, have at most :data:`MAX_PACK_ROWS` rows, and the model's
        products give a row the same bits in any company.
        """
        first, *others = identities
        if not self._runner.rows_are_independent:
            return 1
        num_rows, prefix_ids = len(first.token_ids), first.prefix_ids
        for count, other in enumerate(others, 1):
            num_rows += len(other.token_ids)
            if num_rows > MAX_PACK_ROWS or other.prefix_ids != prefix_ids:
                return count
        return len(identities)

    def compute(self, identity: EntryIdentity, codec: Codec) -> Entry:
        """The entry of one chunk.

        Args:
            identity: Names the tokens and the prefix; its codec is ``codec``'s name.
            codec: Encodes keys and values.
        """
        steps = self.steps([identity], codec)
        while True:
            try:
                next(steps)
            except StopIteration as stop:
                (entry,) = stop.value
                return entry

    @torch.inference_mode()
    def steps(
        self, identities: Sequence[EntryIdentity], codec: Codec
    ) -> Generator[None, None, list[Entry]]:
        """The entries of several chunks, one layer per step.

        Nothing else may be computed here until it has ended; closing it early is safe.

        Args:
            identities: What :meth:`num_packed` allows.
            codec: Encodes keys and values.
        """
        spec, prefix_ids = self._runner.spec, identities[0].prefix_ids
        assert all(identity.prefix_ids == prefix_ids for identity in identities)
        longest = max(len(identity.token_ids) for identity in identities)
        first = yield from self._place_prefix(prefix_ids, len(prefix_ids) + longest)
        encoders = [
            LayerEncoder(
                codec,
                EntryShape(spec.num_layers, len(i.token_ids), spec.num_kv_heads, spec.head_dim),
            )
            for i in identities
        ]
        yield from self._run(
            [
                self._rows(prefix_ids + i.token_ids, first, self._capture(encoder))
                for i, encoder in zip(identities, encoders, strict=True)
            ]
        )
        return [
            Entry(i, i.key(), e.k, e.v, e.scales) for i, e in zip(identities, encoders, strict=True)
        ]

    def _capture(self, encoder: LayerEncoder) -> Hook:
        """Keeps a chunk's keys and values; nothing behind those of the last layer is wanted."""
        num_tokens = encoder.k.shape[1]

        def hook(layer_rows: LayerRows) -> torch.Tensor | None:
            k, v = layer_rows.k_before_rope[-num_tokens:], layer_rows.v[-num_tokens:]
            encoder.write(layer_rows.layer, k, v)
            return self._no_more_at_last_layer(layer_rows)

        return hook

    def _no_more_at_last_layer(self, layer_rows: LayerRows) -> torch.Tensor | None:
        if layer_rows.layer < self._runner.spec.num_layers - 1:
            return None
        return torch.empty(0, dtype=torch.int64, device=self._runner.device)

    def _place_prefix(
        self, prefix_ids: tuple[int, ...], num_tokens: int
    ) -> Generator[None, None, int]:
        """Have the prefix in front of the scratch memory, with room for ``num_tokens`` in all.

        Returns:
            The first position that has to run.
        """
        if self._runner.spec.rope.is_length_dependent:
            prefix_ids = ()
        is_there = self._prefix_ids == prefix_ids
        # Until it has run, whatever stops it must not leave a prefix that is not there.
        self._prefix_ids = ()
        self._reserve(num_tokens, len(prefix_ids) if is_there else 0)
        if not is_there and prefix_ids:
            yield from self._run([self._rows(prefix_ids, 0, self._no_more_at_last_layer)])
        self._prefix_ids = prefix_ids
        return len(prefix_ids)

    def _rows(self, token_ids: tuple[int, ...], first: int, hook: Hook) -> RowsToRun:
        """The rows from ``first`` on, over the scratch memory."""
        runner, num_tokens = self._runner, len(token_ids)
        device = runner.device
        return RowsToRun(
            SequenceKV.over(runner, self._k, self._v, torch.arange(num_tokens, device=device)),
            torch.tensor(token_ids, dtype=torch.int64, device=device),
            torch.arange(first, num_tokens, device=device),
            hook,
        )

    def _run(self, parts: list[RowsToRun]) -> Generator[None, None, None]:
        """Run parts, one after the other over the same memory within each layer.

        A few rows run beside repeats of themselves: the bits of smaller products depend on the
        number of threads.
        """
        num_rows = sum(len(part.rows) for part in parts)
        last = parts[-1]
        repeat = RowsToRun(last.sequence, last.token_ids, last.rows, self._no_more_at_last_layer)
        parts = parts + [repeat] * max(0, -(-(LEAST_ROWS - num_rows) // len(last.rows)))
        for _ in run_packed(self._runner, parts, cost=CostMeter(self._runner.spec.num_layers)):
            yield
        self.num_rows += num_rows

    def _reserve(self, num_tokens: int, num_kept: int) -> None:
        """Make the scratch memory large enough, keeping its first tokens."""
        if num_tokens <= self._k.shape[2]:
            return
        k, v = self._allocate(-(-num_tokens // _ROUND_UP) * _ROUND_UP)
        k[:, :, :num_kept] = self._k[:, :, :num_kept]
        v[:, :, :num_kept] = self._v[:, :, :num_kept]
        self._k, self._v = k, v

    def _allocate(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory in the form of one page as large as the sequence."""
        runner, spec = self._runner, self._runner.spec
        shape = (spec.num_layers, 1, num_tokens, spec.num_kv_heads, spec.head_dim)
        k, v = (torch.empty(shape, dtype=runner.dtype, device=runner.device) for _ in range(2))
        return k, v
