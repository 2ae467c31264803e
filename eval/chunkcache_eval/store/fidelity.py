"""What a lossy codec costs in fidelity: the same questions under each codec, paired with ``raw``.

Every codec is a quality run of its own (``chunkcache_eval.quality``), in a folder of its own; this
file compares them question by question.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chunkcache.settings import Settings
from chunkcache_eval.quality.arms import arms_for
from chunkcache_eval.quality.measure import AnswerLengths
from chunkcache_eval.quality.outcome import Outcome
from chunkcache_eval.quality.outcome_log import OutcomeLog
from chunkcache_eval.quality.question_set import QuestionSet
from chunkcache_eval.quality.run import SkippedQuestion, measure_quality
from chunkcache_eval.quality.summary import group_by_arm, paired_difference

BASELINE = "raw"
"""The codec that keeps what was computed."""


@dataclass(frozen=True)
class CodecFidelity:
    """One codec under one policy, over the questions of one data set.

    Attributes:
        codec: Its name.
        data: Stem of the data file.
        policy: Name of the policy.
        ratio: Its nominal ratio; None without one.
        n: Questions.
        mean_kl: Mean KL divergence from the full prefill, in nats.
        agreement: Share of its greedy answer that the codec's begins with.
        added_mean_kl: ``mean_kl`` minus that of ``raw``, on the same questions.
        added_low: Lower end of its 95 % interval; None for fewer than two questions.
        added_high: Upper end, likewise.
    """

    codec: str
    data: str
    policy: str
    ratio: float | None
    n: int
    mean_kl: float
    agreement: float
    added_mean_kl: float
    added_low: float | None
    added_high: float | None

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)


@dataclass(frozen=True)
class FidelityRun:
    """All codecs.

    Attributes:
        codecs: Baseline first, policy by policy.
        skipped: Questions left out, once each.
    """

    codecs: tuple[CodecFidelity, ...]
    skipped: tuple[SkippedQuestion, ...]


def measure_fidelity(
    sets: Sequence[QuestionSet],
    codecs: Sequence[str],
    folder: Path,
    *,
    settings: Settings,
    lengths: AnswerLengths,
    progress: Callable[[str], None] = lambda line: None,
) -> FidelityRun:
    """Measure what the folder does not hold yet.

    Args:
        sets: Questions.
        codecs: Names; the baseline is measured whether it is among them or not.
        folder: Holds a quality run per codec; a run that was stopped goes on.
        settings: Model, preparation, and the default policy with its ratio, which is measured
            beside ``none``.
        lengths: How much of the answers counts.
        progress: Told what is going on.

    Raises:
        InvalidValueError: An unknown codec, or the folder holds results of another run.
        ModelError: The model cannot be used.
        StoreError: The store failed.
    """
    arms = arms_for([settings.policy], [settings.preparation], [settings.recompute_ratio])
    outcomes: dict[str, tuple[Outcome, ...]] = {}
    skipped: dict[tuple[str, str], SkippedQuestion] = {}
    for codec in dict.fromkeys((BASELINE, *codecs)):
        progress(f"codec {codec}")
        with OutcomeLog(folder / codec) as log:
            run = measure_quality(
                sets,
                arms,
                log,
                settings=settings.model_copy(update={"codec": codec}),
                lengths=lengths,
                progress=progress,
            )
        outcomes[codec] = run.outcomes
        skipped |= {(q.data, q.question_id): q for q in run.skipped}
    return FidelityRun(compare_codecs(outcomes), tuple(skipped.values()))


def compare_codecs(outcomes: dict[str, tuple[Outcome, ...]]) -> tuple[CodecFidelity, ...]:
    """Compare each codec's outcomes with the baseline's, arm by arm; exact arms say nothing.

    Args:
        outcomes: By codec, the baseline's among them.
    """
    found: list[CodecFidelity] = []
    baseline = group_by_arm(outcomes[BASELINE])
    for codec, own in outcomes.items():
        for key, group in group_by_arm(own).items():
            if group[0].policy == "full" or key not in baseline:
                continue
            added = paired_difference(group, baseline[key], "mean_kl")
            found.append(
                CodecFidelity(
                    codec=codec,
                    data=group[0].data,
                    policy=group[0].policy,
                    ratio=group[0].ratio,
                    n=added.n,
                    mean_kl=sum(o.mean_kl for o in group) / len(group),
                    agreement=sum(o.agreement for o in group) / len(group),
                    added_mean_kl=added.mean,
                    added_low=added.low,
                    added_high=added.high,
                )
            )
    return tuple(found)
