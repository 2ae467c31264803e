"""Signals about stale rows, computed lazily at final global positions.

``QueryProbe``: the question's rows, and others in front of them that nothing stands in for, go
through the layers once over the stale pages, and the attention that the question's rows give each
token is added up.
"""

from collections.abc import Sequence

import torch

from chunkcache.fusion.cost import CostMeter
from chunkcache.fusion.policy import Aggregation
from chunkcache.fusion.recompute import LayerRows, SequenceKV, finish_rows, run_rows
from chunkcache.model.runner import ModelRunner
from chunkcache_kernels.attend_rows.op import column_mass
from chunkcache_kernels.paged import flat_slots


class QueryProbe:
    """Runs the fixed rows over stale pages and reads the question's attention.

    Args:
        runner: The model.
        sequence: Pages with every chunk placed.
        token_ids: int64 ``[num_tokens]`` of the prompt.
        probed_rows: Rows to run, ascending; the question's are among them, none is behind it.
        query_positions: Which of them are the question.
        cost: Charged for the rows.
    """

    def __init__(
        self,
        runner: ModelRunner,
        sequence: SequenceKV,
        token_ids: torch.Tensor,
        probed_rows: torch.Tensor,
        query_positions: Sequence[int],
        cost: CostMeter,
    ) -> None:
        self._runner = runner
        self._sequence = sequence
        self._token_ids = token_ids
        self._probed_rows = probed_rows
        self._query = torch.tensor(query_positions, dtype=torch.int64, device=probed_rows.device)
        self._cost = cost

    def attention(self, layers: tuple[int, ...], aggregation: Aggregation) -> torch.Tensor:
        """Attention mass over all tokens ``[num_tokens]`` fp32, added up over ``layers``.

        Nothing runs behind the last of them.
        """
        runner, sequence, spec = self._runner, self._sequence, self._runner.spec
        total = torch.zeros(len(self._token_ids), device=self._token_ids.device)
        last_layer = max(layers)

        def hook(layer_rows: LayerRows) -> torch.Tensor | None:
            layer = layer_rows.layer
            if layer in layers:
                slots = sequence.keys.slots[layer_rows.rows]
                flat_slots(sequence.k_pages[layer]).index_copy_(0, slots, layer_rows.k)
                is_query = torch.isin(layer_rows.rows, self._query)
                total.add_(
                    column_mass(
                        layer_rows.q[is_query],
                        sequence.k_pages[layer],
                        sequence.keys,
                        self._query,
                        scale=spec.scale,
                        window=spec.windows[layer],
                        softcap=spec.attention_softcap,
                        reduce=aggregation,
                    )
                )
            if layer < last_layer:
                return None
            return torch.empty(0, dtype=torch.int64, device=total.device)

        finish_rows(
            run_rows(
                runner, sequence, self._token_ids, self._probed_rows, cost=self._cost, hook=hook
            )
        )
        return total


def value_deviation(
    layer_rows: LayerRows, sequence: SequenceKV, index: torch.Tensor
) -> torch.Tensor:
    """Squared difference of fresh and stale values, summed over heads and dims.

    Args:
        layer_rows: The layer, before its fresh values are written.
        sequence: Pages holding the stale ones.
        index: int64 ``[C]``, which of the running rows to compare.

    Returns:
        fp32 ``[C]``.
    """
    slots = sequence.keys.slots[layer_rows.rows[index]]
    stale = flat_slots(sequence.v_pages[layer_rows.layer]).index_select(0, slots)
    return (layer_rows.v[index].float() - stale.float()).square().sum(dim=(1, 2))
