"""The start-up gate: does this model's reuse path give what its plain forward gives?

Run when a model is first loaded. Chunks are prefilled in isolation, placed at new positions and
recomputed in full; the logits are compared with the library's own forward over the same ids. Keys
and values that were only placed are compared where they must be exact: at layer 0 with those of
the full run, and in every layer with the library's own rotation of the entry's keys, at near and
far offsets. The prompt is longer than the model's sliding window, and than the length at which its
rotation changes, where that is short enough to be run.
"""

import importlib.metadata
import math
import sys
from typing import Any

import msgspec
import torch

from chunkcache.codecs import codec_by_name
from chunkcache.entry import Entry
from chunkcache.errors import GateFailedError
from chunkcache.fusion.cost import CostMeter
from chunkcache.fusion.place import place_entry
from chunkcache.fusion.recompute import SequenceKV, finish_rows, run_rows
from chunkcache.identity import EntryIdentity, TenantNamespace, digest_fields
from chunkcache.model.prefill import IsolatedPrefill
from chunkcache.model.runner import ModelRunner
from chunkcache.model.spec import ModelSpec

GATE_VERSION = 2
"""Raised when the gate checks something else."""

_CHUNK_TOKENS = (37, 1, 26)
_OPENING_TOKENS = 5
_QUESTION_TOKENS = 7
_MAX_EDGE_TOKENS = 1024
"""Windows and switches of the rotation up to this length are crossed by the gate's prompt."""
_COMPARED_ROWS = 64
"""Rows whose logits are compared, from the last on: every other row acts on them."""
_NEAR_OFFSETS = (0, 1, 77)
_TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}
"""Largest difference, as a share of the largest value compared (at least 1)."""


class GateReport(msgspec.Struct, frozen=True):
    """What the gate measured.

    Attributes:
        model_name: Display name.
        logits_difference: Largest absolute difference of logits, fused in full from plain.
        layer0_difference: Largest absolute difference of placed layer-0 keys and values.
        rotation_difference: Largest absolute difference of placed keys, of any layer at near and
            far offsets, from the library's rotation. What is no number counts as the largest.
        tolerance: What each was allowed (relative to the largest value compared).
        num_tokens: Length of the prompt.
        fingerprint: Hex digest of the model, the gate and the libraries it was measured with.
        passed: Whether all were within the tolerance.
        full_only: Whether the full prefill is right and nothing else: chunks must not be reused.
    """

    model_name: str
    logits_difference: float
    layer0_difference: float
    rotation_difference: float
    tolerance: float
    num_tokens: int
    fingerprint: str
    passed: bool
    full_only: bool

    def findings(self) -> str:
        """The figures in words."""
        return (
            f"logits differ by {self.logits_difference:.3g}, placed layer-0 keys and values by "
            f"{self.layer0_difference:.3g}, rotated keys by {self.rotation_difference:.3g}, "
            f"allowed {self.tolerance:.3g}"
        )


def gate_fingerprint(runner: ModelRunner) -> str:
    """Names what a gate's result depends on; a stored result of another one does not count."""
    fields = [("gate", GATE_VERSION), ("model", bytes(runner.digest))]
    fields += [(p, importlib.metadata.version(p)) for p in ("torch", "transformers")]
    fields.append(("device", runner.device.type))
    return digest_fields("gate", fields).hex()


@torch.inference_mode()
def run_gate(runner: ModelRunner) -> GateReport:
    """Measure; seconds for a small model. Runs on the caller's thread."""
    spec, device = runner.spec, runner.device
    generator = torch.Generator().manual_seed(0)

    def draw(num_tokens: int) -> tuple[int, ...]:
        ids = torch.randint(0, spec.vocab_size, (num_tokens,), generator=generator)
        return tuple(ids.tolist())

    first, *others = _CHUNK_TOKENS
    chunks = [draw(n) for n in (max(first, _edge_tokens(spec)), *others)]
    ids = sum(chunks, draw(_OPENING_TOKENS)) + draw(_QUESTION_TOKENS)
    token_ids = torch.tensor(ids, device=device)
    fused = SequenceKV.alone(runner, len(ids))
    prefill, codec = IsolatedPrefill(runner), codec_by_name("raw", runner.dtype)
    entries = [
        prefill.compute(
            EntryIdentity(runner.digest, TenantNamespace(b"gate"), "alone", (), codec.name, chunk),
            codec,
        )
        for chunk in chunks
    ]
    start = _OPENING_TOKENS
    for entry in entries:
        place_entry(fused, entry, start)
        start += entry.num_tokens
    placed = slice(_OPENING_TOKENS, start)
    placed_k, placed_v = fused.k_pages[0, 0, placed].clone(), fused.v_pages[0, 0, placed].clone()
    rows = torch.arange(len(ids), device=device)
    cost = CostMeter(spec.num_layers)
    hidden = finish_rows(run_rows(runner, fused, token_ids, rows, cost=cost)).hidden
    layer0 = max(
        _relative(placed_k, fused.k_pages[0, 0, placed]),
        _relative(placed_v, fused.v_pages[0, 0, placed]),
    )
    compared = runner.logits(hidden[-_COMPARED_ROWS:])
    plain = runner.hf_model(
        input_ids=token_ids[None], use_cache=False, logits_to_keep=len(compared)
    ).logits[0]
    logits = _relative(compared, plain)
    rotation = _rotation_difference(runner, entries[-1])
    tolerance = _TOLERANCE[runner.rounding_dtype]
    full_is_right = logits <= tolerance
    reuse_is_right = layer0 <= tolerance and rotation <= tolerance
    return GateReport(
        model_name=runner.name,
        logits_difference=logits,
        layer0_difference=layer0,
        rotation_difference=rotation,
        tolerance=tolerance,
        num_tokens=len(ids),
        fingerprint=gate_fingerprint(runner),
        passed=full_is_right and reuse_is_right,
        full_only=full_is_right and not reuse_is_right,
    )


def check_gate(report: GateReport) -> None:
    """Refuse a model whose full prefill is not right.

    Raises:
        GateFailedError: With the figures and the tolerance.
    """
    if not report.passed and not report.full_only:
        raise GateFailedError(
            f"model {report.model_name!r} does not reproduce its plain forward: {report.findings()}"
        )


def _edge_tokens(spec: ModelSpec) -> int:
    """The largest length that something changes at and that the gate can afford; 0 if none."""
    edges = [*spec.windows, spec.rope.switch_tokens]
    longest = min(_MAX_EDGE_TOKENS, spec.max_positions - sum(_CHUNK_TOKENS))
    return max((e for e in edges if e is not None and e <= longest), default=0)


def _rotation_difference(runner: ModelRunner, entry: Entry) -> float:
    """Placed keys of every layer from the library's rotation of the entry's, at several offsets."""
    num_tokens, spec = entry.num_tokens, runner.spec
    last = spec.max_positions - num_tokens
    cases = {(start, start + num_tokens) for start in (*_NEAR_OFFSETS, last) if 0 <= start <= last}
    switch = spec.rope.switch_tokens
    if switch is not None and switch >= num_tokens:
        cases |= {(0, switch), (0, switch + 1)}
    decoder: Any = runner.hf_model.model
    library: Any = sys.modules[type(decoder.layers[0].self_attn).__module__]
    worst = 0.0
    for start, length_tokens in sorted(cases):
        here = SequenceKV.alone(runner, num_tokens, start=start, length_tokens=length_tokens)
        place_entry(here, entry, 0)
        # A length-dependent module is shown the whole length, as a forward would.
        first = 0 if spec.rope.is_length_dependent else start
        positions = torch.arange(first, length_tokens, device=runner.device)[None]
        wanted = slice(start - first, start - first + num_tokens)
        for table, kind in enumerate(spec.rope.layer_types):
            layers = [i for i, t in enumerate(spec.rope.table_of_layer) if t == table]
            k = entry.k[layers].to(runner.device, torch.float32)
            angles = decoder.rotary_emb(k, positions, *(() if kind is None else (kind,)))
            cos, sin = (x[:, wanted] for x in angles)
            _, expected = library.apply_rotary_pos_emb(k, k, cos, sin, unsqueeze_dim=2)
            worst = max(worst, _relative(here.k_pages[layers, 0], expected))
        unrotated = [i for i, t in enumerate(spec.rope.table_of_layer) if t < 0]
        if unrotated:
            worst = max(worst, _relative(here.k_pages[unrotated, 0], entry.k[unrotated]))
    return worst


def _relative(measured: torch.Tensor, reference: torch.Tensor) -> float:
    measured, reference = measured.float(), reference.float()
    difference = float((measured - reference).abs().max())
    scaled = difference / max(1.0, float(reference.abs().max()))
    return scaled if math.isfinite(scaled) else sys.float_info.max
