"""Isolated prefill: one chunk, alone or behind a fixed prefix, to the keys and values of an entry.

One fixed routine whoever asks, so that an entry computed again has the same bits. It works on
scratch memory of its own and knows nothing of stores.
"""

from collections.abc import Sequence

import torch

from chunkcache.codecs import Codec, LayerEncoder
from chunkcache.entry import Entry, EntryShape
from chunkcache.fusion.cost import CostMeter
from chunkcache.fusion.recompute import Hook, LayerRows, SequenceKV, finish_rows, run_rows
from chunkcache.identity import EntryIdentity
from chunkcache.model.runner import ModelRunner

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

    @torch.inference_mode()
    def compute(self, identity: EntryIdentity, codec: Codec) -> Entry:
        """The entry of one chunk.

        Args:
            identity: Names the tokens and the prefix; its codec is ``codec``'s name.
            codec: Encodes keys and values.
        """
        runner, spec = self._runner, self._runner.spec
        prefix_ids, chunk_ids = identity.prefix_ids, identity.token_ids
        num_prefix, num_tokens = len(prefix_ids), len(chunk_ids)
        shape = EntryShape(spec.num_layers, num_tokens, spec.num_kv_heads, spec.head_dim)
        encoder = LayerEncoder(codec, shape)

        def capture(layer_rows: LayerRows) -> torch.Tensor | None:
            k, v = layer_rows.k_before_rope[-num_tokens:], layer_rows.v[-num_tokens:]
            encoder.write(layer_rows.layer, k, v)
            if layer_rows.layer < spec.num_layers - 1:
                return None
            return torch.empty(0, dtype=torch.int64, device=runner.device)

        first = self._place_prefix(prefix_ids, num_prefix + num_tokens)
        self._run(prefix_ids + chunk_ids, first, capture)
        return Entry(identity, identity.key(), encoder.k, encoder.v, encoder.scales)

    def _place_prefix(self, prefix_ids: tuple[int, ...], num_tokens: int) -> int:
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
        if not is_there:
            self._run(prefix_ids, 0, None)
        self._prefix_ids = prefix_ids
        return len(prefix_ids)

    def _run(self, token_ids: Sequence[int], first: int, hook: Hook | None) -> None:
        """Run the rows from ``first`` on over the scratch memory."""
        if first == len(token_ids):
            return
        runner = self._runner
        rows = torch.arange(first, len(token_ids), device=runner.device)
        ids = torch.tensor(token_ids, dtype=torch.int64, device=runner.device)
        slots = torch.arange(len(token_ids), device=runner.device)
        sequence = SequenceKV.over(runner, self._k, self._v, slots)
        cost = CostMeter(runner.spec.num_layers)
        finish_rows(run_rows(runner, sequence, ids, rows, cost=cost, hook=hook))
        self.num_rows += len(rows)

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
