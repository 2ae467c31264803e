"""The report of a quality run: one HTML file that needs nothing beside it, and the plots as files.

This file knows what the report shows and in which order. The markup is in the template; the
numbers come from the summaries.
"""

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from chunkcache_eval.quality.arms import source_of
from chunkcache_eval.quality.bootstrap import Interval
from chunkcache_eval.quality.by_task import TaskBreakdown
from chunkcache_eval.quality.outcome import Outcome
from chunkcache_eval.quality.plots import Plot, draw_plots
from chunkcache_eval.quality.summary import (
    ArmKey,
    ArmSummary,
    Difference,
    best_within,
    frontier,
    group_by_arm,
    paired_difference,
    summarise,
)

BUCKETS = (0.05, 0.10, 0.15, 0.20, 0.30)
"""Charged ratios up to which the best arm is named."""

_NUM_QUESTIONS = 8
_MISSING = "–"  # noqa: RUF001, an en dash stands for a number that there isn't


@dataclass(frozen=True)
class _ArmRow:
    """One arm in the table.

    Attributes:
        arm: Its summary.
        source: Where its method comes from.
        best_within: The buckets in which it is the best arm.
        on_frontier: Whether no other arm beats it in both cost and KL.
        bucket: The smallest bucket that it fits; None above all of them.
        behind: Its mean KL minus the best arm's of that bucket; None for that arm itself, and
            where the two share no question.
    """

    arm: ArmSummary
    source: str
    best_within: tuple[float, ...]
    on_frontier: bool
    bucket: float | None
    behind: Difference | None


@dataclass(frozen=True)
class _TaskRow:
    """One arm across the tasks of its data set; None for a task that it has no outcome of."""

    arm: ArmSummary
    by_task: tuple[ArmSummary | None, ...]


@dataclass(frozen=True)
class _Picture:
    plot: Plot
    uri: str


@dataclass(frozen=True)
class _Section:
    """Everything about one data set."""

    data: str
    num_questions: int
    pictures: tuple[_Picture, ...]
    rows: tuple[_ArmRow, ...]
    tasks: tuple[str, ...]
    task_rows: tuple[_TaskRow, ...]
    best: ArmSummary
    furthest: tuple[Outcome, ...]


def write_report(
    folder: str | Path, outcomes: Iterable[Outcome], commands: Sequence[str], *, seed: int = 0
) -> Path:
    """Writes ``report.html`` and its plots as PNG files.

    The same outcomes and commands give the same bytes, in whatever order the outcomes come.

    Args:
        folder: Where to write; made if it isn't there.
        outcomes: Of any arms and data sets.
        commands: What to type to get the same numbers again.
        seed: Of the bootstrap's draws.

    Returns:
        The path of ``report.html``.

    Raises:
        PlottingUnavailableError: If matplotlib isn't installed.
    """
    outcomes = list(outcomes)
    summaries = summarise(outcomes, seed=seed)
    breakdown = TaskBreakdown.of(outcomes, seed=seed)
    sections = [
        _section([o for o in outcomes if o.data == data], summaries, breakdown, seed)
        for data in sorted({o.data for o in outcomes})
    ]
    page = _environment().get_template("report.html.j2")
    text = page.render(sections=sections, commands=commands, buckets=BUCKETS)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for number, section in enumerate(sections, start=1):
        for picture in section.pictures:
            (folder / f"plot-{number}-{picture.plot.name}.png").write_bytes(picture.plot.png)
    path = folder / "report.html"
    path.write_bytes(text.encode())
    return path


def _section(
    outcomes: Sequence[Outcome],
    everything: Sequence[ArmSummary],
    breakdown: TaskBreakdown,
    seed: int,
) -> _Section:
    data = outcomes[0].data
    arms = [s for s in everything if s.data == data]
    groups = group_by_arm(outcomes)
    best = best_within(arms, BUCKETS[-1]) or min(arms, key=lambda a: (a.mean_kl, a.key))
    has_tasks = breakdown.has_several(data)
    return _Section(
        data=data,
        num_questions=len({(o.task, o.question_id) for o in outcomes}),
        pictures=tuple(_picture(plot) for plot in draw_plots(arms, styled_like=everything)),
        rows=_arm_rows(arms, groups, seed),
        tasks=breakdown.tasks[data] if has_tasks else (),
        task_rows=_task_rows(arms, breakdown) if has_tasks else (),
        best=best,
        furthest=_furthest(groups[best.key]),
    )


def _picture(plot: Plot) -> _Picture:
    return _Picture(plot, f"data:image/png;base64,{base64.b64encode(plot.png).decode()}")


def _arm_rows(
    arms: Sequence[ArmSummary], groups: dict[ArmKey, list[Outcome]], seed: int
) -> tuple[_ArmRow, ...]:
    best = {bucket: best_within(arms, bucket) for bucket in BUCKETS}
    unbeaten = {arm.key for arm in frontier(arms)}
    rows = []
    for arm in sorted(arms, key=lambda a: (a.mean_kl, a.charged_ratio, a.key)):
        bucket = next((b for b in BUCKETS if arm.charged_ratio <= b), None)
        ahead = None if bucket is None else best[bucket]
        rows.append(
            _ArmRow(
                arm=arm,
                source=source_of(arm.policy),
                best_within=tuple(b for b in BUCKETS if best[b] is arm),
                on_frontier=arm.key in unbeaten,
                bucket=bucket,
                behind=None if ahead is None else _behind(groups, arm, ahead, seed),
            )
        )
    return tuple(rows)


def _behind(
    groups: dict[ArmKey, list[Outcome]], arm: ArmSummary, best: ArmSummary, seed: int
) -> Difference | None:
    ours, theirs = groups[arm.key], groups[best.key]
    asked = {(o.task, o.question_id) for o in theirs}
    if arm is best or asked.isdisjoint((o.task, o.question_id) for o in ours):
        return None
    return paired_difference(ours, theirs, "mean_kl", seed=seed)


def _task_rows(arms: Sequence[ArmSummary], breakdown: TaskBreakdown) -> tuple[_TaskRow, ...]:
    return tuple(
        _TaskRow(arm, breakdown.row(arm))
        for arm in sorted(arms, key=lambda a: (a.mean_kl, a.charged_ratio, a.key))
    )


def _furthest(outcomes: Iterable[Outcome]) -> tuple[Outcome, ...]:
    """The questions that the arm answers least like the full prefill, the worst first."""
    ranked = sorted(outcomes, key=lambda o: (-o.mean_kl, o.task, o.question_id, o.answer))
    return tuple(ranked[:_NUM_QUESTIONS])


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("chunkcache_eval.quality", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "percent": _percent,
        "nats": _nats,
        "signed_nats": _signed_nats,
        "share": _share,
        "ms": _ms,
        "interval": _interval,
    }
    return environment


def _percent(value: float | None) -> str:
    return _MISSING if value is None else f"{value:.1%}".replace(".0%", "%")


def _nats(value: float | None) -> str:
    if value is None:
        return _MISSING
    return f"{value:.4f}" if value == 0 or abs(value) >= 1e-3 else f"{value:.1e}"


def _signed_nats(value: float) -> str:
    return _nats(value) if value < 0 else f"+{_nats(value)}"


def _share(value: float | None) -> str:
    return _MISSING if value is None else f"{value:.3f}"


def _ms(value: float | None) -> str:
    return _MISSING if value is None else f"{value:,.0f}"


def _interval(value: Interval | None, form: str) -> str:
    if value is None:
        return ""
    write = _nats if form == "nats" else _share
    return f"{write(value[0])} to {write(value[1])}"
