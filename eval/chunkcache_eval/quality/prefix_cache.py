"""The exact prefix cache: what a prompt shares with the beginning of an earlier one is not run again.

As vLLM (automatic prefix caching, whole blocks of tokens) and SGLang (a radix tree, token by token)
do it; here token by token and without a limit to what is kept, the most that such a cache can do.
Knows prompts as token ids, and how to run one behind a prefix.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from chunkcache.fusion.cost import CostMeter
from chunkcache.fusion.layout import Layout
from chunkcache.fusion.recompute import SequenceKV, finish_rows, only_rows_from, run_rows
from chunkcache.runtime import Runtime


class SeenPrompts:
    """The prompts that were asked so far."""

    def __init__(self) -> None:
        self._prompts: list[tuple[int, ...]] = []

    def add(self, token_ids: Sequence[int]) -> int:
        """Note a prompt.

        Returns:
            How many of its tokens an earlier one began with; never its last, which has to run.
        """
        prompt = tuple(token_ids)
        shared = max((_num_shared(prompt, p) for p in self._prompts), default=0)
        self._prompts.append(prompt)
        return min(shared, len(prompt) - 1)


def _num_shared(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


@dataclass(frozen=True)
class PrefixRun:
    """A prompt that ran behind a prefix.

    Attributes:
        logits: fp32 ``[vocab]`` of its last token.
        charged_ratio: Rows run behind the prefix, over all layers, over layers times context
            tokens.
        ttft_ms: From the prefix in place to the first token.
    """

    logits: torch.Tensor
    charged_ratio: float
    ttft_ms: float


def run_behind_prefix(runtime: Runtime, layout: Layout, num_reused: int) -> PrefixRun:
    """Have the keys and values of a prefix in place, then run the rest of the prompt.

    Args:
        runtime: The model, its pages and its thread. No other request may be in flight.
        layout: The prompt.
        num_reused: Tokens of the prefix, fewer than the prompt has.
    """
    return runtime.engine.call(lambda: _run(runtime, layout, num_reused)).result()


def _run(runtime: Runtime, layout: Layout, num_reused: int) -> PrefixRun:
    runner, pool = runtime.model.runner, runtime.pool
    num_layers = runner.spec.num_layers
    pages = pool.allocate(layout.num_tokens)
    assert pages is not None
    with pages:
        slots = pages.slots[: layout.num_tokens]
        sequence = SequenceKV.over(runner, pool.k, pool.v, slots)
        ids = torch.tensor(layout.token_ids, dtype=torch.int64, device=runner.device)
        rows = torch.arange(layout.num_tokens, device=runner.device)
        if num_reused:
            finish_rows(
                run_rows(runner, sequence, ids, rows[:num_reused], cost=CostMeter(num_layers))
            )
        cost = CostMeter(num_layers)
        began = time.perf_counter()
        result = finish_rows(
            run_rows(
                runner,
                sequence,
                ids,
                rows[num_reused:],
                cost=cost,
                hook=only_rows_from(num_layers, layout.num_tokens - 1),
            )
        )
        logits = runner.logits(result.hidden)[0]
        int(logits.argmax())  # the first token: what is waited for
        ttft_ms = (time.perf_counter() - began) * 1e3
    return PrefixRun(logits, cost.charged_ratio(layout.num_context_tokens), ttft_ms)
