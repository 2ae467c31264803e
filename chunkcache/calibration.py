"""How fast this machine prefills and reads entries of a model, measured once and kept in the store.

Cheap: one small chunk is run twice, and its entry read from memory a few times. What a disk adds is
learned from real loads (:mod:`chunkcache.store.load_speed`).
"""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import torch

from chunkcache.codecs import Codec
from chunkcache.errors import StoreFullError
from chunkcache.identity import EntryIdentity, TenantNamespace
from chunkcache.model.gate import gate_fingerprint
from chunkcache.model.prefill import IsolatedPrefill
from chunkcache.model.runner import ModelRunner
from chunkcache.short_thread import on_short_thread
from chunkcache.store.entry_format import decode_entry, encode_entry
from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.load_speed import Calibration
from chunkcache.store.reports import keep_report, load_report

_NUM_TOKENS: Final = 64
_NUM_PREFILLS: Final = 2
_NUM_READS: Final = 5


def stored_calibration(
    runner: ModelRunner, codec: Codec, env: StoreEnvironment, progress: Callable[[str], None]
) -> Calibration:
    """The figures of this model, build and codec; measured if the store has none yet.

    Raises:
        StoreError: The store cannot be read, or fails to keep them for another reason than room.
    """
    fingerprint = f"{gate_fingerprint(runner)}/{codec.name}"
    found = load_report(env, "calibration", fingerprint, Calibration)
    if found is None:
        progress("measuring once how fast chunks are prefilled and read")
        found = on_short_thread(lambda: calibrate(runner, codec))
        # A full store serves all the same; the next start measures again.
        with suppress(StoreFullError):
            keep_report(env, "calibration", fingerprint, found)
    return found


def calibrate(runner: ModelRunner, codec: Codec) -> Calibration:
    """Measure, on the caller's thread; the best of a few runs each."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = min(_NUM_TOKENS, runner.spec.max_positions)
    ids = torch.randint(0, runner.spec.vocab_size, (num_tokens,), generator=generator)
    identity = EntryIdentity(
        model=runner.digest,
        namespace=TenantNamespace(b"calibration"),
        preparation="alone",
        prefix_ids=(),
        codec=codec.name,
        token_ids=tuple(ids.tolist()),
    )
    prefill = IsolatedPrefill(runner)
    entry = prefill.compute(identity, codec)
    prefill_s = _best_of(_NUM_PREFILLS, lambda: prefill.compute(identity, codec))
    stored = memoryview(encode_entry(entry))
    load_s = _best_of(_NUM_READS, lambda: decode_entry(stored, identity))
    return Calibration(prefill_s / num_tokens, load_s / entry.num_bytes)


def _best_of(times: int, task: Callable[[], object]) -> float:
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        task()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
