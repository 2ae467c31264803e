"""How far a cell's fused prompt is from the library's own forward over the same ids."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from chunkcache.codecs import codec_by_name
from chunkcache.entry import Entry
from chunkcache.fusion.cost import CostMeter
from chunkcache.fusion.place import place_entry
from chunkcache.fusion.recompute import SequenceKV, finish_rows, run_rows
from chunkcache.identity import EntryIdentity, TenantNamespace
from chunkcache.model.loading import LoadedModel
from chunkcache.model.prefill import IsolatedPrefill
from chunkcache.model.quiet import quiet_library
from chunkcache.model.runner import ModelRunner
from chunkcache_eval.models.cells import (
    MAX_POSITIONS,
    OFFSETS,
    PROMPT_TOKENS,
    load_cell,
)

LOGIT_LIMIT = 1e-4
KEY_LIMIT = 1e-5
"""Largest differences in fp32."""
BF16_NOISE_FACTOR = 1.5
"""A bf16 cell may differ by so many times what the library's own bf16 differs by: both round at
each step, in another order of sums."""

_CHUNK_TOKENS = (61, 27)
_OPENING_TOKENS = 5
_MOVED_TOKENS = 9

Progress = Callable[[str], None]


@dataclass(frozen=True)
class CellResult:
    """One family with one rotation; differences are the largest absolute ones.

    Attributes:
        family: ``model_type``.
        rope: Name of the rotation.
        max_logit_diff: Logits of the prompt fused in full, every row, in fp32.
        layer0_k_diff: Placed layer-0 keys of a chunk, at offsets 0, 1, 77 and the last one.
        bf16_logit_diff: Logits of the same prompt in bf16 from plain ones in fp32 arithmetic over
            the same weights; of a typical row, not the largest.
        bf16_noise: What the library's own forwards in bf16 and fp32 arithmetic differ by, the
            same way.
    """

    family: str
    rope: str
    max_logit_diff: float
    layer0_k_diff: float
    bf16_logit_diff: float
    bf16_noise: float

    @property
    def passed(self) -> bool:
        """Whether all is within its limit."""
        return (
            self.max_logit_diff <= LOGIT_LIMIT
            and self.layer0_k_diff <= KEY_LIMIT
            and self.bf16_logit_diff <= BF16_NOISE_FACTOR * self.bf16_noise
        )


def measure_matrix(
    cells: Sequence[tuple[str, str]], progress: Progress = lambda line: None
) -> Iterator[CellResult]:
    """Measure cells one after the other; half a second each.

    Args:
        cells: Families with rotations.
        progress: Told of each.
    """
    with tempfile.TemporaryDirectory(prefix="chunkcache-eval-") as folder:
        for number, (family, rope) in enumerate(cells, 1):
            progress(f"{family} with {rope} rotation ({number} of {len(cells)})")
            yield measure_cell(family, rope, Path(folder))


@torch.inference_mode()
def measure_cell(family: str, rope: str, folder: Path) -> CellResult:
    """Measure one cell.

    Args:
        family: ``model_type``.
        rope: Name of the rotation.
        folder: Where its tiny model is written.
    """
    with quiet_library():
        exact, half = (load_cell(family, rope, folder, d) for d in ("float32", "bfloat16"))
    prompt = _draw(exact, PROMPT_TOKENS, 1)
    half_diff, noise = bf16_difference(half, prompt)
    return CellResult(
        family,
        rope,
        max_logit_diff=_largest(fused_logits(exact.runner, prompt), _plain(exact, prompt)),
        layer0_k_diff=max(
            layer0_key_difference(exact.runner, _draw(exact, _MOVED_TOKENS, 3), offset)
            for offset in (*OFFSETS, MAX_POSITIONS - _MOVED_TOKENS)
        ),
        bf16_logit_diff=half_diff,
        bf16_noise=noise,
    )


@torch.inference_mode()
def bf16_difference(model: LoadedModel, prompt: Sequence[int]) -> tuple[float, float]:
    """How far fused bf16 logits are from the same weights' in fp32, and how far plain ones are.

    The second figure is the noise of two plain forwards of the library, one in bf16 and one in
    fp32. The model is in fp32 afterwards.
    """
    fused, plain = fused_logits(model.runner, prompt), _plain(model, prompt)
    model.runner.hf_model.float()
    exact = _plain(model, prompt)
    return _typical(fused, exact), _typical(plain, exact)


def fused_logits(runner: ModelRunner, prompt: Sequence[int]) -> torch.Tensor:
    """Logits ``[tokens, vocab]`` of a prompt whose chunks are placed and then recomputed in full."""
    sequence = SequenceKV.alone(runner, len(prompt))
    start = _OPENING_TOKENS
    for num_tokens in _CHUNK_TOKENS:
        place_entry(sequence, _entry(runner, prompt[start : start + num_tokens]), start)
        start += num_tokens
    ids = torch.tensor(list(prompt), device=runner.device)
    rows, cost = torch.arange(len(prompt), device=runner.device), CostMeter(runner.spec.num_layers)
    return runner.logits(finish_rows(run_rows(runner, sequence, ids, rows, cost=cost)).hidden)


@torch.inference_mode()
def layer0_key_difference(runner: ModelRunner, chunk: Sequence[int], offset: int) -> float:
    """Largest difference of layer-0 keys and values of a chunk that stands at ``offset``.

    1. The library's forward of the chunk, told that it stands there.
    2. The chunk's entry, computed at offset 0, placed there.
    """
    from transformers import DynamicCache

    here = SequenceKV.alone(runner, len(chunk), start=offset)
    place_entry(here, _entry(runner, chunk), 0)
    cache = DynamicCache()
    positions = torch.arange(offset, offset + len(chunk), device=runner.device)[None]
    ids = torch.tensor([list(chunk)], device=runner.device)
    decoder: Any = runner.hf_model.model
    decoder(input_ids=ids, position_ids=positions, cache=cache, use_cache=True)
    layer: Any = cache.layers[0]
    return max(
        _largest(here.k_pages[0, 0], layer.keys[0].transpose(0, 1)),
        _largest(here.v_pages[0, 0], layer.values[0].transpose(0, 1)),
    )


def _entry(runner: ModelRunner, chunk: Sequence[int]) -> Entry:
    codec = codec_by_name("raw", runner.dtype)
    identity = EntryIdentity(
        runner.digest, TenantNamespace(b"e" * 32), "alone", (), codec.name, tuple(chunk)
    )
    return IsolatedPrefill(runner).compute(identity, codec)


def _draw(model: LoadedModel, num_tokens: int, seed: int) -> tuple[int, ...]:
    """Random ids, control tokens left out."""
    generator = torch.Generator().manual_seed(seed)
    vocab = model.runner.spec.vocab_size
    return tuple(torch.randint(17, vocab, (num_tokens,), generator=generator).tolist())


def _plain(model: LoadedModel, prompt: Sequence[int]) -> torch.Tensor:
    """The library's logits ``[tokens, vocab]``, as they are: bf16 ones are compared as fp32."""
    ids = torch.tensor([list(prompt)], device=model.runner.device)
    return model.runner.hf_model(input_ids=ids, use_cache=False).logits[0].float()


def _largest(measured: torch.Tensor, reference: torch.Tensor) -> float:
    return float((measured.float() - reference.float()).abs().max())


def _typical(measured: torch.Tensor, reference: torch.Tensor) -> float:
    """Mean over the vocabulary, median over the rows.

    An expert that two forwards choose between by the last bit makes some rows differ by much more,
    in either of them.
    """
    return float((measured - reference).abs().mean(dim=-1).median())
