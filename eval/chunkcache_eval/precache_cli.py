"""``chunkcache eval precache``."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from chunkcache_api.cli.console import print_json, reporting_errors, results, say
from chunkcache_api.cli.help_text import help_text
from chunkcache_api.cli.opening import open_cache
from chunkcache_api.cli.options import (
    ChunkTokensOption,
    CodecOption,
    JsonOption,
    ModelOption,
    PreparationOption,
)

if TYPE_CHECKING:
    from chunkcache_eval.precache import PrecacheReport

HELP = help_text(
    """Measure the offline job: tokens/s beside bare prefill, a second run, and reuse over edits.

    A corpus is pre-cached into a store of its own, which is deleted afterwards: first with the
    documents of --previous in the place of their current versions, then again with nothing changed,
    then with the current ones. Without --previous, each document's earlier version lacks its middle
    line. Without --data, the demo corpus is used.""",
    "chunkcache eval precache",
    "chunkcache eval precache --data docs/current --previous docs/old --json",
    "chunkcache eval precache --data docs/ --limit 40",
)


def register(eval_app: typer.Typer) -> None:
    """Add the command."""
    eval_app.command("precache", help=HELP)(precache)


def precache(
    data: Annotated[
        list[Path] | None,
        typer.Option(help="A folder of documents; repeat for more.", show_default="demo corpus"),
    ] = None,
    previous: Annotated[
        list[Path] | None,
        typer.Option(help="A folder of earlier versions, by the same paths; repeat for more."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1, help="Documents, evenly spaced; all of --previous stay.", show_default="all"
        ),
    ] = None,
    model: ModelOption = None,
    preparation: PreparationOption = None,
    codec: CodecOption = None,
    chunk_tokens: ChunkTokensOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure, print a table."""
    with reporting_errors(as_json=as_json):
        from chunkcache.errors import InvalidValueError
        from chunkcache.text_files import TextItem
        from chunkcache_api.cli.demo_data import demo_items
        from chunkcache_eval.precache import (
            measure_precache,
            read_corpus,
            spread,
            without_middle_line,
        )

        current, failures = read_corpus(data or [])
        if data is None:
            items = [sized.item for sized in demo_items()]
            current = {i.document_id: i for i in items if isinstance(i, TextItem)}
        if not current:
            raise InvalidValueError("no documents found", param="data")
        earlier, unread = read_corpus(previous or [])
        rest = {name: item for name, item in current.items() if name not in earlier}
        replaced = {name: item for name, item in current.items() if name in earlier}
        current = replaced | spread(rest, limit)
        if previous is None:
            earlier = {name: without_middle_line(item) for name, item in current.items()}
        with (
            TemporaryDirectory(prefix="chunkcache-precache-") as folder,
            open_cache(
                store=Path(folder) / "store",
                model=model,
                preparation=preparation,
                codec=codec,
                chunk_tokens=chunk_tokens,
            ) as opened,
        ):
            report = measure_precache(
                opened.cache, current, earlier, failures=(*failures, *unread), progress=say
            )
    if as_json:
        print_json(report.to_dict())
    else:
        for failure in report.failures:
            say(f"{failure.item}: {failure.message} ({failure.code})")
        results.print(_table(report))


def _table(report: "PrecacheReport") -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("run")
    for name in ("documents", "chunks", "prefilled", "seconds", "tokens/s", ""):
        table.add_column(name, justify="right" if name else "left")
    notes = {
        "first": f"{report.bare_ratio:.0%} of bare prefill",
        "second": f"{report.second_ratio:.1%} of the first run's time",
        "edits": f"{report.reuse_ratio:.0%} of the chunks reused",
    }
    for name, note in notes.items():
        run = getattr(report, name)
        table.add_row(
            name,
            f"{run.documents:,}",
            f"{run.chunks:,}",
            f"{run.prefilled_chunks:,}",
            f"{run.seconds:,.1f}",
            f"{run.tokens_per_second:,.0f}",
            note,
        )
    return table
