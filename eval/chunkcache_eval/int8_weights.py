"""What int8 weights cost and gain: KL from the model as it came, and tokens per second.

Both models run side by side in one process, over the built-in probe passages, in turns, so that a
machine that slows down meanwhile slows both.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from chunkcache.engine.decode import DecodeRow, DecodeTile
from chunkcache.fusion.fidelity import mean_kl
from chunkcache.model.loading import LoadedModel
from chunkcache.model_opening import load_configured_model
from chunkcache.pages import PagePool
from chunkcache.probe_set import built_in_probe_set
from chunkcache.settings import Settings

Progress = Callable[[str], None]

_SKIPPED_TOKENS = 16
"""The first tokens of a text, which every model guesses at."""


@dataclass(frozen=True)
class Int8WeightsCost:
    """Int8 weights beside the same model's own.

    Attributes:
        model: Display name.
        dtype: Compute dtype of both.
        compared_tokens: Next-token distributions compared.
        mean_kl: Mean of KL(own || int8) over them, in nats.
        top1_agreement: Share of them with the same likeliest token.
        decode_tokens_per_second: Of one answer, with the model's own weights.
        decode_tokens_per_second_int8: The same with int8.
        prefill_tokens_per_second: Of the library's forward, with the model's own weights.
        prefill_tokens_per_second_int8: The same with int8.
        weights_bytes: Bytes of parameters and buffers.
        weights_bytes_int8: The same with int8.
        threads: Threads of the products.
    """

    model: str
    dtype: str
    compared_tokens: int
    mean_kl: float
    top1_agreement: float
    decode_tokens_per_second: float
    decode_tokens_per_second_int8: float
    prefill_tokens_per_second: float
    prefill_tokens_per_second_int8: float
    weights_bytes: int
    weights_bytes_int8: int
    threads: int

    @property
    def decode_speedup(self) -> float:
        """How many times the tokens per second of one answer."""
        return self.decode_tokens_per_second_int8 / self.decode_tokens_per_second

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self) | {"decode_speedup": self.decode_speedup}


@torch.inference_mode()
def measure_int8_weights(
    settings: Settings,
    *,
    num_text_tokens: int = 512,
    num_steps: int = 32,
    repeats: int = 3,
    progress: Progress = lambda line: None,
) -> Int8WeightsCost:
    """Measure; both models are in memory meanwhile.

    Args:
        settings: Which model; its quantisation is replaced.
        num_text_tokens: Length of the text, cut to what the model takes.
        num_steps: Decode steps behind it per run.
        repeats: Runs of each, of which the median counts.
        progress: Told what is going on.

    Raises:
        ChunkCacheError: The model cannot be loaded, or takes no int8 weights.
    """
    own, int8 = (
        load_configured_model(settings.model_copy(update={"quantisation": q}), progress)
        for q in ("none", "int8")
    )
    spec = own.runner.spec
    text = "\n".join(built_in_probe_set().passages.values())
    ids = own.tokenizer.encode_content(text)[: min(num_text_tokens, spec.max_positions - num_steps)]
    progress(f"comparing next-token distributions over {len(ids)} tokens")
    logits = [_forward(model, ids)[_SKIPPED_TOKENS:] for model in (own, int8)]
    tiles = [_Decoding(model, settings, ids, num_steps) for model in (own, int8)]
    decode: list[list[float]] = [[], []]
    prefill: list[list[float]] = [[], []]
    for number in range(repeats):
        progress(f"timing, {number + 1} of {repeats}")
        for index, model in enumerate((own, int8)):
            decode[index].append(tiles[index].tokens_per_second())
            began = time.perf_counter()
            _forward(model, ids, num_logits=1)
            prefill[index].append(len(ids) / (time.perf_counter() - began))
    return Int8WeightsCost(
        model=own.runner.name,
        dtype=own.runner.identity.compute_dtype,
        compared_tokens=len(logits[0]),
        mean_kl=mean_kl(*logits),
        top1_agreement=float((logits[0].argmax(-1) == logits[1].argmax(-1)).float().mean()),
        decode_tokens_per_second=statistics.median(decode[0]),
        decode_tokens_per_second_int8=statistics.median(decode[1]),
        prefill_tokens_per_second=statistics.median(prefill[0]),
        prefill_tokens_per_second_int8=statistics.median(prefill[1]),
        weights_bytes=_weights_bytes(own),
        weights_bytes_int8=_weights_bytes(int8),
        threads=torch.get_num_threads(),
    )


class _Decoding:
    """Steps of one answer behind a text, in the tile that serves.

    The text's keys and values are random: how long a step takes does not depend on them.
    """

    def __init__(
        self, model: LoadedModel, settings: Settings, ids: tuple[int, ...], num_steps: int
    ) -> None:
        runner = model.runner
        pool = PagePool(
            runner.spec,
            num_tokens=len(ids) + num_steps + settings.page_tokens,
            page_tokens=settings.page_tokens,
            dtype=runner.dtype,
            device=runner.device,
        )
        pool.k.normal_()
        pool.v.normal_()
        pages = pool.allocate(len(ids) + num_steps)
        assert pages is not None
        self._pages = pages
        self._tile = DecodeTile(runner, pool, settings.decode_tile_rows)
        self._first, self._num_steps = len(ids), num_steps
        self._step(0)

    def tokens_per_second(self) -> float:
        began = time.perf_counter()
        for step in range(self._num_steps):
            self._step(step)
        return self._num_steps / (time.perf_counter() - began)

    def _step(self, step: int) -> None:
        self._tile.step([DecodeRow(0, self._first + step, self._pages)])


def _forward(model: LoadedModel, ids: tuple[int, ...], *, num_logits: int = 0) -> torch.Tensor:
    """fp32 logits ``[tokens, vocab]`` of the library's forward: the last few, 0 for all."""
    hf_model = model.runner.hf_model
    token_ids = torch.tensor([ids], device=model.runner.device)
    return (
        hf_model(input_ids=token_ids, use_cache=False, logits_to_keep=num_logits).logits[0].float()
    )


def _weights_bytes(model: LoadedModel) -> int:
    hf_model = model.runner.hf_model
    return sum(t.nbytes for t in [*hf_model.parameters(), *hf_model.buffers()])
