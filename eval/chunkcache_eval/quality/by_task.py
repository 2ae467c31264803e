"""The tasks of a data set held apart: each arm's summary on each of them.

An average over tasks hides the ones that need attention across chunks. Knows summaries; doesn't
know how they are shown.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from chunkcache_eval.quality.outcome import Outcome
from chunkcache_eval.quality.summary import ArmKey, ArmSummary, summarise


@dataclass(frozen=True)
class TaskBreakdown:
    """Arms by the tasks of their data sets.

    Attributes:
        tasks: Names of the tasks of each data set, sorted; none for one whose records name none.
        summaries: Of each arm on each task, by its key.
    """

    tasks: dict[str, tuple[str, ...]]
    summaries: dict[ArmKey, ArmSummary]

    @classmethod
    def of(cls, outcomes: Iterable[Outcome], *, seed: int = 0) -> "TaskBreakdown":
        """Summarise outcomes task by task; the draws are as of :func:`summarise`."""
        outcomes = list(outcomes)
        names: dict[str, set[str]] = {}
        for outcome in outcomes:
            names.setdefault(outcome.data, set()).add(outcome.task)
        tasks = {data: () if of == {""} else tuple(sorted(of)) for data, of in names.items()}
        found = summarise(outcomes, by_task=True, seed=seed)
        return cls(tasks, {summary.key: summary for summary in found})

    def row(self, arm: ArmSummary) -> tuple[ArmSummary | None, ...]:
        """An arm's summary on each task of its data set; None for a task without an outcome."""
        data, _, policy, preparation, ratio = arm.key
        keys = ((data, task, policy, preparation, ratio) for task in self.tasks[data])
        return tuple(self.summaries.get(key) for key in keys)

    def has_several(self, data: str) -> bool:
        """Whether a data set has tasks that an average over it mixes."""
        return len(self.tasks[data]) > 1


def arms_with_tasks(
    summaries: Sequence[ArmSummary], breakdown: TaskBreakdown
) -> list[dict[str, Any]]:
    """Arms as they go into JSON, each with its ``tasks``."""
    return [
        arm.to_dict() | {"tasks": [task.to_dict() for task in breakdown.row(arm) if task]}
        for arm in summaries
    ]
