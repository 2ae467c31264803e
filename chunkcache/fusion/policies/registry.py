"""Policies by name: from what a caller sends to a :class:`Policy`."""

from collections.abc import Callable
from dataclasses import dataclass

from chunkcache.errors import InvalidValueError
from chunkcache.fusion.policies.auto import DEFAULT_TARGET_KL, Auto
from chunkcache.fusion.policies.deviation import Deviation
from chunkcache.fusion.policies.full import Full
from chunkcache.fusion.policies.hybrid import Hybrid
from chunkcache.fusion.policies.lego import Lego
from chunkcache.fusion.policies.none import NoRecompute
from chunkcache.fusion.policies.query import Query
from chunkcache.fusion.policies.random import Random
from chunkcache.fusion.policies.shift import Shift
from chunkcache.fusion.policy import Aggregation, Policy


@dataclass(frozen=True)
class PolicyOptions:
    """What a caller may say about a policy; what a policy does not have, it refuses.

    Attributes:
        recompute_ratio: Share of the candidates.
        first_tokens: Tokens at each chunk's start (``lego``, ``hybrid``).
        layers: Layers of the attention signal (``query``, ``hybrid``).
        aggregation: How attention is summed (``query``).
        chunk_floor: Share of the ratio that every chunk gets (``query``, ``hybrid``).
        per_chunk: Whether offsets are averaged chunk by chunk (``shift``).
        target_kl: Mean KL divergence in nats that the answer is to keep to (``auto``).
        seed: Seed of ``random``.
    """

    recompute_ratio: float | None = None
    first_tokens: int | None = None
    layers: str | None = None
    aggregation: Aggregation | None = None
    chunk_floor: float | None = None
    per_chunk: bool | None = None
    target_kl: float | None = None
    seed: int | None = None

    def given(self) -> dict[str, object]:
        """The fields that were set."""
        return {k: v for k, v in vars(self).items() if v is not None}


_BUILDERS: dict[str, tuple[Callable[..., Policy], dict[str, str]]] = {
    "full": (Full, {}),
    "none": (NoRecompute, {}),
    "lego": (Lego, {"first_tokens": "num_tokens"}),
    "deviation": (Deviation, {"recompute_ratio": "ratio"}),
    "query": (
        Query,
        {
            "recompute_ratio": "ratio",
            "layers": "layers",
            "aggregation": "aggregation",
            "chunk_floor": "chunk_floor",
        },
    ),
    "hybrid": (
        Hybrid,
        {
            "recompute_ratio": "ratio",
            "first_tokens": "first_tokens",
            "layers": "layers",
            "chunk_floor": "chunk_floor",
        },
    ),
    "shift": (Shift, {"recompute_ratio": "ratio", "per_chunk": "per_chunk"}),
    "auto": (Auto, {"target_kl": "target_kl"}),
    "random": (Random, {"recompute_ratio": "ratio", "seed": "seed"}),
}

POLICY_NAMES = tuple(_BUILDERS)


def make_policy(
    name: str,
    options: PolicyOptions,
    default_ratio: float,
    default_target_kl: float = DEFAULT_TARGET_KL,
) -> Policy:
    """Build a policy.

    Args:
        name: One of :data:`POLICY_NAMES`.
        options: The caller's parameters.
        default_ratio: Ratio where the policy needs one and the caller gave none.
        default_target_kl: The same of a target.

    Raises:
        InvalidValueError: Unknown name, a parameter that the policy does not have, a bad value.
    """
    if name not in _BUILDERS:
        raise InvalidValueError(
            f"unknown policy {name!r}; known: {', '.join(POLICY_NAMES)}", param="policy"
        )
    build, names = _BUILDERS[name]
    arguments: dict[str, object] = {}
    if "recompute_ratio" in names:
        arguments["ratio"] = default_ratio
    if "target_kl" in names:
        arguments["target_kl"] = default_target_kl
    for option, value in options.given().items():
        if option not in names:
            raise InvalidValueError(f"policy {name!r} has no parameter {option!r}", param=option)
        arguments[names[option]] = value
    return build(**arguments)
