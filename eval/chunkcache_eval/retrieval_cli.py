"""``chunkcache eval retrieval``."""

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from chunkcache_api.cli.console import print_json, reporting_errors, results, say
from chunkcache_api.cli.help_text import help_text
from chunkcache_api.cli.opening import open_cache
from chunkcache_api.cli.options import JsonOption, ModelOption, PreparationOption

if TYPE_CHECKING:
    from chunkcache_eval.retrieval import RetrievalReport

HELP = help_text(
    """Measure how often retrieval finds a question's own passages among its first five.

    By meaning alone (dense), by words alone (bm25), and by both fused (hybrid, the default of every
    search). Data files hold one JSON object per line; questions whose gold_chunk_ids name some of
    their chunks count. All their chunks together are the corpus. Without a file, the demo corpus
    is used.

    --rerank also has the served model score the 20 best passages of the hybrid ranking by how likely
    the question is behind each, over entries that are prefilled once, and says what that gains and
    costs.""",
    "chunkcache eval retrieval --data questions.jsonl",
    "chunkcache eval retrieval --data a.jsonl --data b.jsonl --limit 50 --json",
)

_DEMO_DOCUMENTS = 6
"""All that a question of the demo corpus comes with; its gold one is among them."""


def register(eval_app: typer.Typer) -> None:
    """Add the command."""
    eval_app.command("retrieval", help=HELP)(retrieval)


def retrieval(
    data: Annotated[
        list[Path] | None,
        typer.Option(help="A question set (JSONL); repeat for more.", show_default="demo corpus"),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Questions per file.", show_default="all")
    ] = None,
    rerank: Annotated[
        bool,
        typer.Option(
            "--rerank", help="Also rerank the best 20 with the model's own cached keys and values."
        ),
    ] = False,
    model: ModelOption = None,
    preparation: PreparationOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure recall at five."""
    with reporting_errors(as_json=as_json):
        from chunkcache_eval.datasets.records import demo_questions, read_questions
        from chunkcache_eval.reranking import MeasuredReranker
        from chunkcache_eval.retrieval import QuestionSet, measure_retrieval
        from chunkcache_retriever.minilm import MiniLmEmbedder

        sets = [QuestionSet(path.name, read_questions(path)) for path in data or []]
        with ExitStack() as opened:
            reranker = None
            if rerank:
                folder = opened.enter_context(TemporaryDirectory(prefix="chunkcache-rerank-"))
                cache = opened.enter_context(
                    open_cache(store=Path(folder) / "store", model=model, preparation=preparation)
                ).cache
                reranker = MeasuredReranker(cache)
            report = measure_retrieval(
                sets or [QuestionSet("demo", demo_questions(_DEMO_DOCUMENTS))],
                MiniLmEmbedder(),
                limit=limit,
                reranker=reranker,
                progress=say,
            )
    if as_json:
        print_json(report.to_dict())
    else:
        results.print(_table(report))


def _table(report: "RetrievalReport") -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("questions")
    table.add_column("number", justify="right")
    for kind in report.recall:
        table.add_column(f"{kind} recall@5", justify="right")
    for name, values in report.by_set.items():
        shown = [f"{value:.3f}" for value in values.values()]
        table.add_row(name, f"{report.num_questions[name]:,}", *shown)
    total = sum(report.num_questions.values())
    table.add_row("all", f"{total:,}", *(f"{value:.3f}" for value in report.recall.values()))
    if report.rerank is not None:
        say(
            f"reranked: recall@5 {report.rerank.recall:.3f}, of at most "
            f"{report.rerank.recall_of_candidates:.3f}; {report.rerank.score_ms:,.0f} ms a question "
            f"over kept entries, {report.rerank.prefill_ms:,.0f} ms more where none was kept"
        )
    return table
