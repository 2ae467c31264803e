"""Which calibration of the policy ``auto`` holds here: the store's own, or one shipped for the model.

A calibration is of one model (weights, rope, compute dtype and all else that entries depend on),
preparation and codec. Measuring one takes questions; `chunkcache eval auto` does that.
"""

from functools import cache
from importlib.resources import files
from typing import Final

import msgspec

from chunkcache.errors import NotCalibratedError
from chunkcache.fusion.policies.auto_table import AutoTable
from chunkcache.identity import digest_fields
from chunkcache.runtime import Runtime
from chunkcache.store.environment import StoreEnvironment
from chunkcache.store.reports import keep_report, load_report

AUTO_VERSION: Final = 1
"""Raised when row sets or signals mean something else."""
_KIND: Final = "auto"


def auto_fingerprint(runtime: Runtime) -> str:
    """Names what a calibration depends on, in hex."""
    fields = [
        ("auto", AUTO_VERSION),
        ("model", bytes(runtime.model.runner.digest)),
        ("preparation", str(runtime.preparation)),
        ("codec", runtime.codec.name),
    ]
    return digest_fields("auto", fields).hex()


def auto_table(runtime: Runtime) -> AutoTable:
    """The calibration of the model, preparation and codec in use.

    One in the store counts before one that is shipped.

    Raises:
        NotCalibratedError: There is none.
        StoreError: The store cannot be read.
    """
    fingerprint = auto_fingerprint(runtime)
    found = load_report(runtime.env, _KIND, fingerprint, AutoTable)
    if found is None:
        found = _shipped().get(fingerprint)
    if found is None:
        raise NotCalibratedError(
            f"`auto` is not calibrated for {runtime.model.runner.name} over "
            f"{runtime.preparation}, {runtime.codec.name}: `chunkcache eval auto --data QUESTIONS "
            "--keep` measures it and keeps the result in this store",
            param="policy",
        )
    return found


def keep_auto_table(env: StoreEnvironment, table: AutoTable) -> None:
    """Keep a calibration in a store, in place of an older one.

    Raises:
        StoreFullError: There is no room for it.
        StoreError: The store cannot be written.
    """
    keep_report(env, _KIND, table.fingerprint, table)


@cache
def _shipped() -> dict[str, AutoTable]:
    data = files("chunkcache").joinpath("auto_tables.json").read_bytes()
    tables = msgspec.json.decode(data, type=tuple[AutoTable, ...])
    return {table.fingerprint: table for table in tables}
