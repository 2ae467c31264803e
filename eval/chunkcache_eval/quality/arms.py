"""Arms of a quality run: a policy, its parameters, a preparation and a ratio, under one name.

Published methods have a name of their own for their setting of a policy. Everything that a caller
can get wrong is refused here, before a model is loaded; nothing here runs one.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from chunkcache.errors import InvalidValueError
from chunkcache.fusion.policies.registry import POLICY_NAMES, PolicyOptions, make_policy
from chunkcache.fusion.preparation import Preparation

Variant = Literal["", "late layers", "mask by row order", "behind seen prefix"]
"""What a method does that its policy's parameters do not say. ``late layers``: the signal comes
from the last quarter of the layers, which only a model can name. ``mask by row order``: rows are
masked as the method's published code does, not by position. ``behind seen prefix``: no fusion; what
an earlier prompt of the data set began with as well is reused, and nothing else."""


@dataclass(frozen=True)
class Method:
    """What a name stands for, its ratio left open.

    Attributes:
        policy: Name of the policy.
        options: Its parameters.
        source: Where it comes from.
        variant: See :data:`Variant`.
    """

    policy: str
    options: PolicyOptions
    source: str
    variant: Variant = ""


@dataclass(frozen=True)
class Arm:
    """One way to answer every question.

    Attributes:
        name: As it stands in results.
        policy: Name of the policy.
        options: Its parameters, the ratio among them.
        preparation: How chunks are prefilled; canonical text.
        ratio: The nominal ratio; None for a policy without one.
        source: Where the method comes from.
        variant: As of :class:`Method`.
    """

    name: str
    policy: str
    options: PolicyOptions
    preparation: str
    ratio: float | None
    source: str
    variant: Variant = ""

    def options_for(self, num_layers: int) -> PolicyOptions:
        """The parameters for a model of so many layers."""
        if self.variant != "late layers":
            return self.options
        first = num_layers - max(1, num_layers // 4)
        return replace(self.options, layers=f"{first}-{num_layers - 1}")

    @property
    def meaning(self) -> str:
        """Every parameter but the ratio, defaults included: what results of one name must share."""
        policy = make_policy(self.policy, replace(self.options, recompute_ratio=None), 0.0)
        return f"{policy}, {self.variant}" if self.variant else str(policy)

    def __str__(self) -> str:
        ratio = "" if self.ratio is None else f" {self.ratio:.3g}"
        return f"{self.name}{ratio} {self.preparation}"


_SOURCES = {
    "full": "exact prefill",
    "none": "concatenation",
    "random": "control",
    "deviation": "CacheBlend, arXiv:2405.16444",
    "lego": "EPIC, arXiv:2410.15332",
    "shift": "AgentKVShift",
}

METHODS: dict[str, Method] = {
    name: Method(name, PolicyOptions(), _SOURCES.get(name, "chunkcache")) for name in POLICY_NAMES
} | {
    "cacheblend": Method("deviation", PolicyOptions(), "CacheBlend, arXiv:2405.16444"),
    "cacheblend-as-shipped": Method(
        "deviation",
        PolicyOptions(),
        "CacheBlend's published code, its mask by row order",
        "mask by row order",
    ),
    "prefix-cache": Method(
        "full",
        PolicyOptions(),
        "exact prefix cache, as in vLLM and SGLang",
        "behind seen prefix",
    ),
    "shift-per-chunk": Method("shift", PolicyOptions(per_chunk=True), "after AgentKVShift"),
    "epic": Method("lego", PolicyOptions(first_tokens=4), "EPIC, arXiv:2410.15332"),
    "infoflow": Method(
        "query",
        PolicyOptions(aggregation="l2", chunk_floor=0.0),
        "InfoFlow-KV, arXiv:2603.05353",
        "late layers",
    ),
    "prophetkv": Method(
        "query",
        PolicyOptions(layers="all", aggregation="sum", chunk_floor=0.0),
        "ProphetKV, arXiv:2602.02579",
    ),
}
"""What each name stands for: every policy with its defaults, and published methods."""

BOUNDS = ("none", "full")
"""Methods between which all others lie; every run has them, ``none`` first: the others name its F1."""

_NAME = re.compile(r"([\w-]+)(?:\((-?\d{1,6}(?:\.\d{1,6})?)\))?")


def arms_for(
    policies: Sequence[str], preparations: Sequence[str], ratios: Sequence[float]
) -> tuple[Arm, ...]:
    """The product of policies, preparations and ratios, preparation by preparation.

    The bounds stand at the head of each preparation, asked for or not. A policy without a ratio
    stands there once. What is named twice stands there once.

    Args:
        policies: Names of :data:`METHODS`; ``epic(8)`` sets the number of first tokens, and
            ``auto(0.05)`` the target.
        preparations: ``alone``, ``sink(k)``, ``system``, ``preamble``, ``neighbours(n)``.
        ratios: For policies that have one; each within 0 and 1.

    Raises:
        InvalidValueError: Unknown name, a value out of range, or nothing to choose from.
    """
    for name, values in (("policy", policies), ("preparation", preparations)):
        if not values:
            raise InvalidValueError(f"no {name} is given", param=name)
    for ratio in ratios:
        if not 0.0 <= ratio <= 1.0:
            raise InvalidValueError(f"ratio {ratio:g} is not within 0 and 1", param="ratio")
    methods = {name: _method(name) for name in dict.fromkeys((*BOUNDS, *map(str.strip, policies)))}
    canonical = dict.fromkeys(str(Preparation.parse(text.strip())) for text in preparations)
    return tuple(
        _arm(name, method, preparation, ratio)
        for preparation in canonical
        for name, method in methods.items()
        for ratio in _ratios_of(name, method, ratios)
    )


def source_of(name: str) -> str:
    """Where the method of an arm's name comes from; empty for a name that is none."""
    parsed = _NAME.fullmatch(name)
    method = METHODS.get(parsed[1]) if parsed else None
    return "" if method is None else method.source


def _method(name: str) -> Method:
    parsed = _NAME.fullmatch(name)
    method = METHODS.get(parsed[1]) if parsed else None
    if parsed is None or method is None:
        raise InvalidValueError(
            f"unknown policy {name!r}; known: {', '.join(sorted(METHODS))}", param="policy"
        )
    if parsed[2] is not None:
        method = replace(method, options=_with_number(name, method, parsed[2]))
    make_policy(method.policy, method.options, default_ratio=0.0)
    return method


def _with_number(name: str, method: Method, number: str) -> PolicyOptions:
    """The method's options with the number that stands behind its name."""
    if method.policy == "auto":
        return replace(method.options, target_kl=float(number))
    if "." in number:
        raise InvalidValueError(f"{name!r} needs a whole number of tokens", param="policy")
    return replace(method.options, first_tokens=int(number))


def _ratios_of(name: str, method: Method, ratios: Sequence[float]) -> tuple[float | None, ...]:
    if make_policy(method.policy, method.options, default_ratio=0.0).nominal_ratio is None:
        return (None,)
    if not ratios:
        raise InvalidValueError(f"policy {name!r} needs a ratio", param="ratio")
    return tuple(dict.fromkeys(ratios))


def _arm(name: str, method: Method, preparation: str, ratio: float | None) -> Arm:
    return Arm(
        name=name,
        policy=method.policy,
        options=replace(method.options, recompute_ratio=ratio),
        preparation=preparation,
        ratio=ratio,
        source=method.source,
        variant=method.variant,
    )
