"""Eviction policies by name."""

from typing import Literal, get_args

from chunkcache.errors import InvalidValueError
from chunkcache.store.eviction.lru import LruPolicy
from chunkcache.store.eviction.policy import EvictionPolicy
from chunkcache.store.eviction.s3fifo import S3FifoPolicy
from chunkcache.store.eviction.value import ValuePolicy

EvictionName = Literal["value", "lru", "s3fifo"]
EVICTION_NAMES: tuple[EvictionName, ...] = get_args(EvictionName)


def make_eviction(name: str, capacity_bytes: int) -> EvictionPolicy:
    """A policy for one tier.

    Args:
        name: One of :data:`EVICTION_NAMES`.
        capacity_bytes: The tier's budget.

    Raises:
        InvalidValueError: There is no such policy.
    """
    if name == "value":
        return ValuePolicy()
    if name == "lru":
        return LruPolicy()
    if name == "s3fifo":
        return S3FifoPolicy(capacity_bytes)
    raise InvalidValueError(
        f"eviction {name!r} is not one of {', '.join(EVICTION_NAMES)}", param="eviction"
    )
