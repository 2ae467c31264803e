"""Decoding: one token for every growing answer, always in a batch tile of one fixed shape.

A matrix product of a fixed shape gives each row the same bits whatever the other rows hold; one
of another shape does not. So the tile is padded, and an answer's logits do not depend on who else
is being answered.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from chunkcache.model.runner import ModelRunner
from chunkcache.pages import PageLease, PagePool
from chunkcache_kernels.attend_decode.op import attend_decode
from chunkcache_kernels.paged import DecodeBatch, flat_slots
from chunkcache_kernels.rotate import rotate


@dataclass(frozen=True)
class DecodeRow:
    """One answer's next step.

    Attributes:
        token_id: The newest token; its keys and values are not in the pages yet.
        position: Its position.
        pages: The sequence's pages, with a slot for ``position``.
    """

    token_id: int
    position: int
    pages: PageLease


class DecodeTile:
    """Runs decode steps.

    Args:
        runner: The model.
        pool: Where the pages are.
        num_rows: The tile's fixed number of rows.
    """

    def __init__(self, runner: ModelRunner, pool: PagePool, num_rows: int) -> None:
        self._runner = runner
        self._pool = pool
        self.num_rows = num_rows

    def step(self, rows: Sequence[DecodeRow]) -> torch.Tensor:
        """Run one token of each sequence.

        Args:
            rows: 1 to ``num_rows`` sequences.

        Returns:
            fp32 logits ``[len(rows), vocab]``.
        """
        assert 1 <= len(rows) <= self.num_rows
        runner, spec, pool = self._runner, self._runner.spec, self._pool
        device = runner.device
        batch = self._batch(rows)
        num_live = len(rows)
        padding = [0] * (self.num_rows - num_live)
        tables = [runner.rotary.tables(r.position + 1).take(slice(r.position, None)) for r in rows]
        cos = torch.cat([t.cos for t in tables] + [tables[0].cos for _ in padding], dim=1)
        sin = torch.cat([t.sin for t in tables] + [tables[0].sin for _ in padding], dim=1)
        slots = torch.stack([r.pages.slots[r.position] for r in rows])
        hidden = runner.embed(torch.tensor([r.token_id for r in rows] + padding, device=device))
        for layer in range(spec.num_layers):
            q, k, v = runner.project(layer, hidden)
            table = tables[0].table_of_layer[layer]
            if table >= 0:
                q, k = rotate(q, cos[table], sin[table]), rotate(k, cos[table], sin[table])
            flat_slots(pool.k[layer]).index_copy_(0, slots, k[:num_live])
            flat_slots(pool.v[layer]).index_copy_(0, slots, v[:num_live])
            attended = attend_decode(
                q,
                pool.k[layer],
                pool.v[layer],
                batch,
                scale=spec.scale,
                window=spec.windows[layer],
                softcap=spec.attention_softcap,
            )
            hidden = runner.finish(layer, hidden, attended, unrelated_rows=True)
        return runner.logits(hidden)[:num_live]

    def _batch(self, rows: Sequence[DecodeRow]) -> DecodeBatch:
        width = max(len(r.pages.pages) for r in rows)
        tables = torch.zeros(self.num_rows, width, dtype=torch.int32)
        lengths = torch.zeros(self.num_rows, dtype=torch.int64)
        for index, row in enumerate(rows):
            tables[index, : len(row.pages.pages)] = torch.tensor(row.pages.pages, dtype=torch.int32)
            lengths[index] = row.position + 1
        device = self._runner.device
        return DecodeBatch(tables.to(device), lengths.to(device), self._pool.page_tokens)
