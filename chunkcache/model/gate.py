"""The start-up gate: does this model's reuse path give what its plain forward gives?

Run when a model is first loaded. Chunks are prefilled in isolation, placed at new positions and
recomputed in full; the logits are compared with the library's own forward over the same ids. Keys
and values that were only placed are compared at layer 0, where they must be exact at any offset.
"""

import importlib.metadata

import msgspec
import torch

from chunkcache.codecs import codec_by_name
from chunkcache.errors import GateFailedError
from chunkcache.fusion.cost import CostMeter
from chunkcache.fusion.place import place_entry
from chunkcache.fusion.recompute import SequenceKV, finish_rows, run_rows
from chunkcache.identity import EntryIdentity, TenantNamespace, digest_fields
from chunkcache.model.prefill import IsolatedPrefill
from chunkcache.model.runner import ModelRunner

GATE_VERSION = 1
"""Raised when the gate checks something else."""

_CHUNK_TOKENS = (37, 1, 26)
_OPENING_TOKENS = 5
_QUESTION_TOKENS = 7
_TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}
"""Largest difference, as a share of the largest value compared (at least 1)."""


class GateReport(msgspec.Struct, frozen=True):
    """What the gate measured.

    Attributes:
        model_name: Display name.
        logits_difference: Largest absolute difference of logits, fused in full from plain.
        layer0_difference: Largest absolute difference of placed layer-0 keys and values.
        tolerance: What either was allowed (relative to the largest value compared).
        num_tokens: Length of the prompt.
        fingerprint: Hex digest of the model, the gate and the libraries it was measured with.
        passed: Whether both were within the tolerance.
    """

    model_name: str
    logits_difference: float
    layer0_difference: float
    tolerance: float
    num_tokens: int
    fingerprint: str
    passed: bool


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

    chunks = [draw(n) for n in _CHUNK_TOKENS]
    ids = sum(chunks, draw(_OPENING_TOKENS)) + draw(_QUESTION_TOKENS)
    token_ids = torch.tensor(ids, device=device)

    fused = _pages(runner, len(ids))
    prefill = IsolatedPrefill(runner)
    codec = codec_by_name("raw", runner.dtype)
    start = _OPENING_TOKENS
    for chunk in chunks:
        identity = EntryIdentity(
            runner.digest, TenantNamespace(b"gate"), "alone", (), codec.name, chunk
        )
        place_entry(fused, prefill.compute(identity, codec), start)
        start += len(chunk)
    placed = slice(_OPENING_TOKENS, start)
    placed_k, placed_v = fused.k_pages[0, 0, placed].clone(), fused.v_pages[0, 0, placed].clone()
    rows = torch.arange(len(ids), device=device)
    cost = CostMeter(spec.num_layers)
    hidden = finish_rows(run_rows(runner, fused, token_ids, rows, cost=cost)).hidden
    layer0 = max(
        _relative(placed_k, fused.k_pages[0, 0, placed]),
        _relative(placed_v, fused.v_pages[0, 0, placed]),
    )
    plain = runner.hf_model(input_ids=token_ids[None], use_cache=False).logits[0].float()
    logits = _relative(runner.logits(hidden), plain)
    tolerance = _TOLERANCE[runner.dtype]
    return GateReport(
        model_name=runner.name,
        logits_difference=logits,
        layer0_difference=layer0,
        tolerance=tolerance,
        num_tokens=len(ids),
        fingerprint=gate_fingerprint(runner),
        passed=logits <= tolerance and layer0 <= tolerance,
    )


def check_gate(report: GateReport) -> None:
    """Refuse a model that failed.

    Raises:
        GateFailedError: With both figures and the tolerance.
    """
    if not report.passed:
        raise GateFailedError(
            f"model {report.model_name!r} does not reproduce its plain forward: logits differ by "
            f"{report.logits_difference:.3g}, placed layer-0 keys and values by "
            f"{report.layer0_difference:.3g}, allowed {report.tolerance:.3g}"
        )


def _relative(measured: torch.Tensor, reference: torch.Tensor) -> float:
    measured, reference = measured.float(), reference.float()
    difference = float((measured - reference).abs().max())
    scaled = difference / max(1.0, float(reference.abs().max()))
    return scaled if scaled == scaled else float("inf")


def _pages(runner: ModelRunner, num_tokens: int) -> SequenceKV:
    spec = runner.spec
    shape = (spec.num_layers, 1, num_tokens, spec.num_kv_heads, spec.head_dim)
    k, v = (torch.empty(shape, dtype=runner.dtype, device=runner.device) for _ in range(2))
    return SequenceKV.over(runner, k, v, torch.arange(num_tokens, device=runner.device))
