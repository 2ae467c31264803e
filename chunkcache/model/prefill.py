"""Isolated prefill: one chunk, alone or behind a fixed prefix, to the keys and values of an entry.

One fixed routine whoever asks, so that an entry computed again has the same bits. It works on
scratch memory of its own and knows nothing of stores.
"""

import torch

from chunkcache.codecs import Codec
from chunkcache.entry import Entry
from chunkcache.fusion.cost import CostMeter
from chunkcache.fusion.recompute import LayerRows, SequenceKV, finish_rows, run_rows
from chunkcache.identity import EntryIdentity
from chunkcache.model.runner import ModelRunner


class IsolatedPrefill:
    """Computes entries.

    The keys and values of the most recent prefix are kept, so that a corpus prepared behind one
    prefix pays for it once. For a rotation that depends on the length they are not reused: a
    prefix's rotated keys would differ from chunk to chunk.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._prefix_ids: tuple[int, ...] = ()
        self._prefix_kv: tuple[torch.Tensor, torch.Tensor] | None = None

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
        shape = (spec.num_layers, num_tokens, spec.num_kv_heads, spec.head_dim)
        k_out = torch.empty(shape, dtype=codec.dtype)
        v_out = torch.empty(shape, dtype=codec.dtype)

        def capture(layer_rows: LayerRows) -> torch.Tensor | None:
            k_out[layer_rows.layer].copy_(layer_rows.k_before_rope[-num_tokens:])
            v_out[layer_rows.layer].copy_(layer_rows.v[-num_tokens:])
            if layer_rows.layer < spec.num_layers - 1:
                return None
            return torch.empty(0, dtype=torch.int64, device=runner.device)

        sequence = self._scratch(num_prefix + num_tokens)
        first = 0
        if prefix_ids and not spec.rope_is_length_dependent:
            k_prefix, v_prefix = self._prefix(prefix_ids)
            sequence.k_pages[:, 0, :num_prefix].copy_(k_prefix)
            sequence.v_pages[:, 0, :num_prefix].copy_(v_prefix)
            first = num_prefix
        rows = torch.arange(first, num_prefix + num_tokens, device=runner.device)
        token_ids = torch.tensor(prefix_ids + chunk_ids, device=runner.device)
        cost = CostMeter(spec.num_layers)
        finish_rows(run_rows(runner, sequence, token_ids, rows, cost=cost, hook=capture))
        return Entry(identity, identity.key(), k_out, v_out)

    def _prefix(self, prefix_ids: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        if self._prefix_kv is None or self._prefix_ids != prefix_ids:
            sequence = self._scratch(len(prefix_ids))
            runner = self._runner
            rows = torch.arange(len(prefix_ids), device=runner.device)
            token_ids = torch.tensor(prefix_ids, device=runner.device)
            cost = CostMeter(runner.spec.num_layers)
            finish_rows(run_rows(runner, sequence, token_ids, rows, cost=cost))
            self._prefix_ids = prefix_ids
            self._prefix_kv = (sequence.k_pages[:, 0], sequence.v_pages[:, 0])
        return self._prefix_kv

    def _scratch(self, num_tokens: int) -> SequenceKV:
        """Fresh memory in the form of one page as large as the sequence."""
        runner, spec = self._runner, self._runner.spec
        shape = (spec.num_layers, 1, num_tokens, spec.num_kv_heads, spec.head_dim)
        k, v = (torch.empty(shape, dtype=runner.dtype, device=runner.device) for _ in range(2))
        slots = torch.arange(num_tokens, device=runner.device)
        return SequenceKV.over(runner, k, v, slots)
