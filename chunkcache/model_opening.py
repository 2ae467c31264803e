"""From settings to a model that may serve: loaded, fit for the preparation, and past the gate.

Knows settings and the store's reports, and neither engine nor tiers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import torch

from chunkcache.errors import InvalidValueError, ModelError
from chunkcache.fusion.layout import prompt_prefix_ids
from chunkcache.fusion.preparation import Preparation
from chunkcache.model.gate import GateReport, check_gate, gate_fingerprint, run_gate
from chunkcache.model.loading import LoadedModel, ModelOutline, load_model, outline_model
from chunkcache.model.template import DEFAULT_SYSTEM
from chunkcache.settings import Settings
from chunkcache.short_thread import on_short_thread
from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.reports import keep_report, load_report

Progress = Callable[[str], None]


def load_configured_model(settings: Settings, progress: Progress) -> LoadedModel:
    """Load the model that the settings name, as they say. Errors as in ``load_model``."""
    return load_model(
        settings.model,
        cache_dir=settings.cache_dir.expanduser(),
        device=settings.device,
        dtype=settings.dtype,
        revision=settings.revision,
        thinking=settings.thinking,
        trust_remote_code=settings.trust_remote_code,
        adapter=settings.adapter,
        quantisation=settings.quantisation,
        progress=progress,
    )


def outline_configured_model(settings: Settings, progress: Progress) -> ModelOutline:
    """Read the small files of the model that the settings name. Errors as in ``load_model``."""
    return outline_model(
        settings.model,
        cache_dir=settings.cache_dir.expanduser(),
        device=settings.device,
        dtype=settings.dtype,
        revision=settings.revision,
        trust_remote_code=settings.trust_remote_code,
        progress=progress,
    )


@contextmanager
def second_model() -> Iterator[None]:
    """What is loaded and made inside stands beside a model that goes on serving.

    Raises:
        ModelError: There is no memory for both.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ModelError("there is no memory for a second model beside the old one") from error


def load_successor(old: LoadedModel, settings: Settings, progress: Progress) -> LoadedModel | None:
    """The model as its files are now, beside the one that is loaded; None if nothing differs.

    Raises:
        ModelError: It cannot be loaded, or there is no memory for a second one.
    """
    _check_memory(old)
    model = load_configured_model(settings, progress)
    if model.answers_digest() != old.answers_digest():
        return model
    progress("the model has not changed")
    return None


def check_prefix_fits(model: LoadedModel, preparation: Preparation, settings: Settings) -> None:
    """Refuse a preparation that, with a chunk behind it, is longer than the model's context.

    Raises:
        InvalidValueError: With the sizes.
    """
    system_ids = model.tokenizer.encode_content(settings.system or DEFAULT_SYSTEM)
    limit = model.runner.spec.max_positions
    for prepared in dict.fromkeys((preparation, preparation.without_neighbours)):
        prefix_ids = prepared.prefix_ids(
            model.template,
            model.tokenizer,
            model.bos_token_id,
            prompt_prefix_ids(model.template, system_ids),
            [(0,) * settings.chunk_tokens] * prepared.num_neighbours,
        )
        if len(prefix_ids) + settings.chunk_tokens > limit:
            raise InvalidValueError(
                f"preparation {prepared} ({len(prefix_ids)} tokens) and chunks of "
                f"{settings.chunk_tokens} tokens do not fit the model's {limit} positions",
                param="preparation",
            )


def pass_gate(model: LoadedModel, env: StoreEnvironment, progress: Progress) -> GateReport:
    """The stored result if it is of this very model and build, else a new one, kept.

    Raises:
        GateFailedError: Not even the full prefill is right.
    """
    fingerprint = gate_fingerprint(model.runner)
    report = load_report(env, "gate", fingerprint, GateReport)
    if report is None:
        progress("checking the model once: fused in full against its plain forward")
        report = on_short_thread(lambda: run_gate(model.runner))
        keep_report(env, "gate", fingerprint, report)
    check_gate(report)
    if report.full_only:
        progress(f"the model serves full prefills alone, no reuse: {report.findings()}")
    return report


def _check_memory(model: LoadedModel) -> None:
    """Refuse a second model beside one on the CPU where memory for it is not there.

    Raises:
        ModelError: With both figures.
    """
    runner = model.runner
    if runner.device.type != "cpu":
        return
    tensors = [*runner.hf_model.parameters(), *runner.hf_model.buffers()]
    needed_bytes = sum(t.nbytes for t in tensors)
    available_bytes = psutil.virtual_memory().available
    if needed_bytes > available_bytes:
        raise ModelError(
            f"a second model beside the old one needs {needed_bytes:,} bytes of memory, "
            f"{available_bytes:,} are available"
        )
