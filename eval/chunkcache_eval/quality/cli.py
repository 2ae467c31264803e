"""``chunkcache eval quality``."""

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chunkcache_api.cli.console import ExitCode, print_json, reporting_errors, say
from chunkcache_api.cli.help_text import help_text
from chunkcache_api.cli.options import CodecOption, JsonOption, ModelOption

if TYPE_CHECKING:
    from chunkcache.settings import Settings
    from chunkcache_eval.quality.by_task import TaskBreakdown
    from chunkcache_eval.quality.run import QualityRun
    from chunkcache_eval.quality.summary import ArmSummary

HELP = help_text(
    """Measure how close fused answers come to the full prefill's, and at what cost.

    Every policy sees the same token ids. Policies: full, none, hybrid, query, shift, random,
    auto (auto(0.05) sets its target), and published methods by name: cacheblend, epic,
    infoflow, prophetkv. cacheblend-as-shipped keeps the published code's mask by row order;
    prefix-cache reuses only what an earlier prompt of the file began with. full and none always
    run.
    Data files hold one JSON object per line, as records or in LongBench's form; without one, the
    demo corpus is used.

    Results go to the folder of --out: outcomes.jsonl, report.html and plots. Run the command
    again to go on with a run that was stopped, or with other policies to add to it.""",
    "chunkcache eval quality --data questions.jsonl --limit 20",
    "chunkcache eval quality --policy hybrid --policy cacheblend --ratio 0.1",
    "chunkcache eval quality --preparation alone --preparation preamble --json",
    "chunkcache eval quality --preparation 'neighbours(2)' --neighbours overlap",
    notes="Exit codes: 0 all measured; 1 nothing measured; 2 wrong usage; 3 some lines or "
    "questions were skipped; 130 interrupted.",
)

DEFAULT_POLICIES = (
    "hybrid",
    "query",
    "cacheblend",
    "cacheblend-as-shipped",
    "epic",
    "infoflow",
    "prophetkv",
    "shift",
    "prefix-cache",
    "random",
)


@dataclass(frozen=True)
class _Choices:
    """What was asked for, with the defaults filled in.

    Attributes:
        data: Data files; none for the demo corpus.
        policies: Names of arms.
        preparations: How chunks are prefilled.
        ratios: Nominal ratios.
        limit: Questions per file, None for all.
        answer_tokens: Answer tokens that are compared.
        f1_tokens: Answer tokens that are scored.
        out: Folder of the results.
        neighbours: How neighbours are found.
    """

    data: list[Path]
    policies: list[str]
    preparations: list[str]
    ratios: list[float]
    limit: int | None
    answer_tokens: int
    f1_tokens: int
    out: Path
    neighbours: str

    def command(self, settings: "Settings") -> str:
        """What to type to get the same again."""
        words = ["chunkcache", "eval", "quality", "--model", settings.model]
        words += ["--codec", settings.codec]
        for option, values in (
            ("--data", self.data),
            ("--policy", self.policies),
            ("--preparation", self.preparations),
            ("--ratio", self.ratios),
        ):
            for value in values:
                words += [option, str(value)]
        if self.limit is not None:
            words += ["--limit", str(self.limit)]
        if self.neighbours != "embedding":
            words += ["--neighbours", self.neighbours]
        words += ["--answer-tokens", str(self.answer_tokens), "--f1-tokens", str(self.f1_tokens)]
        return shlex.join([*words, "--out", str(self.out)])


@dataclass(frozen=True)
class _Result:
    """What a command has to tell at its end."""

    run: "QualityRun"
    summaries: "list[ArmSummary]"
    breakdown: "TaskBreakdown"
    report: Path | None
    broken_lines: list[str]

    @property
    def exit_code(self) -> ExitCode:
        if not self.run.outcomes:
            return ExitCode.FAILED
        return ExitCode.PARTIAL if self.run.skipped or self.broken_lines else ExitCode.OK


def register(eval_app: typer.Typer) -> None:
    """Add the command."""
    eval_app.command("quality", help=HELP)(quality)


def quality(
    data: Annotated[
        list[Path] | None,
        typer.Option(help="A question set (JSONL); repeat for more.", show_default="demo corpus"),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A policy or published method, as in epic(8); repeat for more.",
            show_default=", ".join(DEFAULT_POLICIES),
        ),
    ] = None,
    preparation: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND",
            help="What chunks are prefilled behind: alone, sink(k), system, preamble or "
            "neighbours(n); repeat for more.",
            show_default="preamble",
        ),
    ] = None,
    neighbours: Annotated[
        str,
        typer.Option(
            metavar="KIND",
            help="How neighbours(n) finds them, among all passages of the file that share no "
            "prompt with the chunk: embedding, shared (by a group of chunks), overlap (of tokens) "
            "or random. One folder of results holds one kind.",
        ),
    ] = "embedding",
    ratio: Annotated[
        list[float] | None,
        typer.Option(help="A recompute ratio, 0 to 1; repeat for more.", show_default="0.15"),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Questions per file.", show_default="all")
    ] = None,
    answer_tokens: Annotated[
        int, typer.Option(min=1, help="Answer tokens whose distributions are compared.")
    ] = 8,
    f1_tokens: Annotated[
        int, typer.Option(min=1, help="Answer tokens that are scored against the gold answers.")
    ] = 32,
    out: Annotated[Path, typer.Option(help="Folder of the results; made if missing.")] = Path(
        "chunkcache.quality"
    ),
    model: ModelOption = None,
    codec: CodecOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure, print a table, write a report."""
    with reporting_errors(as_json=as_json):
        from chunkcache.settings import load_settings
        from chunkcache_api.cli.opening import log_to_stderr

        log_to_stderr()
        settings = load_settings(model=model, codec=codec)
        choices = _Choices(
            data=data or [],
            policies=policy or list(DEFAULT_POLICIES),
            preparations=preparation or [settings.preparation],
            ratios=ratio or [settings.recompute_ratio],
            limit=limit,
            answer_tokens=answer_tokens,
            f1_tokens=f1_tokens,
            out=out,
            neighbours=neighbours,
        )
        result = _measure(choices, settings)
    if as_json:
        from chunkcache_eval.quality.by_task import arms_with_tasks

        print_json(
            {
                "arms": arms_with_tasks(result.summaries, result.breakdown),
                "skipped": [asdict(question) for question in result.run.skipped],
                "broken_lines": result.broken_lines,
                "report": None if result.report is None else str(result.report),
            }
        )
    elif result.run.outcomes:
        from chunkcache_eval.quality.table import print_summaries

        print_summaries(result.summaries, result.breakdown)
    raise typer.Exit(result.exit_code)


def _measure(choices: _Choices, settings: "Settings") -> _Result:
    """Everything that can be refused is refused before a model is loaded."""
    from chunkcache_eval.quality.arms import arms_for
    from chunkcache_eval.quality.by_task import TaskBreakdown
    from chunkcache_eval.quality.html_report import write_report
    from chunkcache_eval.quality.measure import AnswerLengths
    from chunkcache_eval.quality.neighbours import neighbour_source
    from chunkcache_eval.quality.outcome_log import OutcomeLog
    from chunkcache_eval.quality.plots import require_plotting
    from chunkcache_eval.quality.question_set import load_sets
    from chunkcache_eval.quality.run import measure_quality
    from chunkcache_eval.quality.summary import summarise

    arms = arms_for(choices.policies, choices.preparations, choices.ratios)
    lengths = AnswerLengths(choices.answer_tokens, choices.f1_tokens)
    source = neighbour_source(choices.neighbours)
    require_plotting()
    broken: list[str] = []
    sets = load_sets(choices.data, choices.limit, broken.append)
    for line in broken:
        say(line)
    with OutcomeLog(choices.out) as log:
        run = measure_quality(
            sets,
            arms,
            log,
            settings=settings,
            lengths=lengths,
            neighbours=source,
            progress=say,
        )
        report = None
        if run.outcomes:
            commands = log.remember_command(choices.command(settings))
            report = write_report(choices.out, log.outcomes, commands)
            say(f"report: {report}")
    breakdown = TaskBreakdown.of(run.outcomes)
    return _Result(run, summarise(run.outcomes), breakdown, report, broken)
