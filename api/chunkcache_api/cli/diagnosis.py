"""What ``chunkcache doctor`` finds out: machine, store, model, fidelity, settings, and what is wrong.

Gathers and judges; prints nothing. What cannot be looked at is None, and a problem says why.
"""

import os
import platform
import shutil
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from chunkcache_api.cli.stats import open_store_stats, store_stats

if TYPE_CHECKING:
    from collections.abc import Callable

    from chunkcache.probing import FidelityReport
    from chunkcache.runtime import Runtime
    from chunkcache.settings import Settings

When = Literal["auto", "again", "skip"]
"""Measure fidelity: unless there are figures already, in any case, or not at all."""

LOW_ROOM_BYTES: Final = 256 << 20

VERDICTS: Final = {
    "exact": "fused answers are the full prefill's",
    "very_close": "fused answers are all but the full prefill's",
    "close": "fused answers are close to the full prefill's: mostly the same words",
    "loose": "fused answers often part from the full prefill's; a higher ratio brings them closer",
    "far": "fused answers are not the full prefill's; use a higher ratio, another preparation, or "
    "policy full with this model",
}


@dataclass(frozen=True)
class Problem:
    """Something that should be seen to.

    Attributes:
        code: Stable reason.
        message: What is wrong, and what to do.
    """

    code: str
    message: str


@dataclass
class Diagnosis:
    """Everything that was found; sections are None where they could not be looked at.

    Attributes:
        machine: Processor, memory, device, versions.
        settings: Settings in force that differ from their defaults.
        store: What the store holds, and the room left.
        model: The model's name, geometry and gate figures.
        speed: What loading an entry costs against prefilling it.
        remote: The remote tier and what waits for it, where there is one.
        fidelity: How close fused answers are.
        problems: What is wrong; empty when all is well.
    """

    machine: dict[str, Any]
    settings: dict[str, dict[str, Any]]
    store: dict[str, Any] | None = None
    model: dict[str, Any] | None = None
    speed: dict[str, Any] | None = None
    remote: dict[str, Any] | None = None
    fidelity: dict[str, Any] | None = None
    problems: list[Problem] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The command's JSON."""
        return {"ok": not self.problems} | asdict(self)

    def note(self, code: str, message: str) -> None:
        """Add a problem."""
        self.problems.append(Problem(code, message))


def start_diagnosis(settings: "Settings") -> Diagnosis:
    """What can be said before anything is opened."""
    return Diagnosis(machine=_machine(settings), settings=changed_settings(settings))


def diagnose_closed_store(diagnosis: Diagnosis, settings: "Settings") -> None:
    """Look at the store where no runtime could be opened over it."""
    from chunkcache.errors import StoreError

    try:
        stats = store_stats(settings.store)
    except StoreError as error:
        if error.code not in {p.code for p in diagnosis.problems}:
            diagnosis.note(error.code, error.message)
        return
    diagnosis.store = _store(diagnosis, stats, None)


def diagnose(diagnosis: Diagnosis, runtime: "Runtime") -> None:
    """Look at an open store and its model."""
    network_filesystem = runtime.env.network_filesystem
    diagnosis.store = _store(diagnosis, open_store_stats(runtime.env), network_filesystem)
    diagnosis.model = _model(runtime)
    diagnosis.speed = _speed(runtime)
    diagnosis.remote = _remote(diagnosis, runtime)
    if not diagnosis.speed["load_pays"]:
        diagnosis.note(
            "load_slower_than_prefill",
            "reading an entry takes longer than computing it: entries on disk are passed over; "
            "use a smaller codec or a faster disk",
        )
    if runtime.gate.full_only:
        diagnosis.note(
            "model_full_only",
            f"chunks cannot be reused with this model, every prompt runs in full: "
            f"{runtime.gate.findings()}",
        )
    if network_filesystem is not None:
        diagnosis.note(
            "network_filesystem",
            f"the store is on {network_filesystem}; LMDB is not safe there: move it to a local disk",
        )


def diagnose_fidelity(
    diagnosis: Diagnosis, runtime: "Runtime", when: When, progress: "Callable[[str], None]"
) -> None:
    """Look up how close fused answers are, or measure it."""
    from chunkcache.errors import ChunkCacheError
    from chunkcache.probing import measure_fidelity, stored_fidelity

    if when == "skip":
        return
    try:
        report = stored_fidelity(runtime) if when == "auto" else None
        is_new = report is None
        report = report or measure_fidelity(runtime, progress)
    except ChunkCacheError as error:
        diagnosis.note(error.code, f"fidelity could not be measured: {error.message}")
        return
    diagnosis.fidelity = _fidelity(report, is_new=is_new)
    if report.closeness == "far":
        diagnosis.note("fidelity_far", VERDICTS["far"])


def changed_settings(settings: "Settings") -> dict[str, dict[str, Any]]:
    """Settings that differ from their defaults: ``value`` and ``default`` by name."""
    from chunkcache.settings_sources import shown_value

    changed = {}
    for name, info in type(settings).model_fields.items():
        value, default = getattr(settings, name), info.get_default(call_default_factory=True)
        if value != default:
            changed[name] = {"value": _plain(shown_value(name, value)), "default": _plain(default)}
    return changed


def _machine(settings: "Settings") -> dict[str, Any]:
    import importlib.metadata

    import psutil
    import torch

    memory = psutil.virtual_memory()
    has_affinity = hasattr(os, "sched_getaffinity")
    accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count(),
        "ram_bytes": memory.total,
        "ram_available_bytes": memory.available,
        "device": settings.device,
        "accelerator": accelerator,
        "python": platform.python_version(),
    } | {name: importlib.metadata.version(name) for name in ("chunkcache", "torch", "transformers")}


def _store(
    diagnosis: Diagnosis, stats: dict[str, Any], network_filesystem: str | None
) -> dict[str, Any]:
    live_bytes = stats["live_bytes"]
    # Pages that were freed are used again before the file grows.
    free_bytes = shutil.disk_usage(stats["store"]).free + stats["file_bytes"] - live_bytes
    room_bytes = max(0, min(stats["max_bytes"] - live_bytes, free_bytes))
    if room_bytes < LOW_ROOM_BYTES:
        diagnosis.note(
            "store_nearly_full",
            f"the store has room for {room_bytes:,} more bytes; raise store_max_bytes, free the "
            "disk, or delete documents",
        )
    return {
        "path": stats["store"],
        "network_filesystem": network_filesystem,
        "documents": stats["documents"],
        "entries": stats["entries"]["disk"],
        "entry_bytes": stats["bytes"]["disk"],
        "file_bytes": stats["file_bytes"],
        "max_bytes": stats["max_bytes"],
        "room_bytes": room_bytes,
        "quarantined": stats["quarantined"],
    }


def _model(runtime: "Runtime") -> dict[str, Any]:
    import msgspec

    runner, gate = runtime.model.runner, runtime.gate
    spec = runner.spec
    return {
        "name": runner.name,
        "family": spec.family.name,
        **runtime.model.weights_facts(),
        "device": str(runner.device),
        "num_layers": spec.num_layers,
        "max_positions": spec.max_positions,
        "entry_bytes_per_token": runtime.codec.bytes_per_token(
            spec.num_layers, spec.num_kv_heads, spec.head_dim
        ),
        "gate": msgspec.to_builtins(gate),
    }


def _speed(runtime: "Runtime") -> dict[str, Any]:
    spec, figures = runtime.model.runner.spec, runtime.load_speed.figures()
    bytes_per_token = runtime.codec.bytes_per_token(
        spec.num_layers, spec.num_kv_heads, spec.head_dim
    )
    num_tokens = runtime.settings.chunk_tokens
    return {
        "prefill_tokens_per_s": 1 / figures.prefill_s_per_row,
        "load_tokens_per_s": 1 / (bytes_per_token * figures.load_s_per_byte),
        "load_bytes_per_s": 1 / figures.load_s_per_byte,
        "load_pays": not runtime.load_speed.is_slower(num_tokens * bytes_per_token, num_tokens),
    }


def _remote(diagnosis: Diagnosis, runtime: "Runtime") -> dict[str, Any] | None:
    remote = runtime.remote
    if remote is None:
        return None
    is_reachable = remote.check()
    stats = remote.stats()
    if not is_reachable:
        reasons = ", ".join(sorted(stats.failures)) or "no answer"
        diagnosis.note(
            "remote_unreachable",
            f"the remote {stats.address} cannot be used ({reasons}): answers are computed without "
            "it, and what it is owed waits. Check that it runs, the URL, the credentials in the "
            "environment, and the network; or leave out the setting remote",
        )
    return {
        "address": stats.address,
        "reachable": is_reachable,
        "to_send": stats.to_send,
        "to_remove": stats.to_remove,
    }


def _fidelity(report: "FidelityReport", *, is_new: bool) -> dict[str, Any]:
    import msgspec

    closeness = report.closeness
    return msgspec.to_builtins(report) | {
        "closeness": closeness,
        "verdict": VERDICTS[closeness],
        "measured": "now" if is_new else "earlier",
    }


def _plain(value: Any) -> Any:
    """A setting's value as JSON knows it."""
    return value if isinstance(value, str | int | float | None) else str(value)
