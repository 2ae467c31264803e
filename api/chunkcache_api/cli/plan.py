"""``chunkcache plan``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from chunkcache_api.cli.console import print_json, reporting_errors, results, say
from chunkcache_api.cli.help_text import help_text
from chunkcache_api.cli.options import ChunkTokensOption, JsonOption, ModelOption
from chunkcache_api.cli.render import size

if TYPE_CHECKING:
    from chunkcache.corpus_plan import CorpusPlan, CorpusSize
    from chunkcache.model.loading import ModelOutline
    from chunkcache.settings import Settings

HELP = help_text(
    """Tell what a corpus will take, before anything is computed: disk, load times, break-even.

    Give files and folders, or a number of tokens. The model's configuration and tokenizer are read;
    its weights are not loaded unless --measure asks how fast it prefills here. Every codec has its
    row: bytes per token, disk for the corpus, time to read a thousand tokens, and the prefill speed
    at which reading entries would gain nothing.""",
    "chunkcache plan docs/",
    "chunkcache plan --tokens 10000000 --model models/llama-3.1-8b",
    "chunkcache plan docs/ --measure --json | jq .codecs",
)


def plan(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Files and folders.", show_default=False)
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Plan for so many tokens instead of files.")
    ] = None,
    prefill_speed: Annotated[
        float | None,
        typer.Option(min=0.001, help="Tokens per second that the model prefills, if known."),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Load the model and measure its prefill speed.")
    ] = False,
    model: ModelOption = None,
    chunk_tokens: ChunkTokensOption = None,
    as_json: JsonOption = False,
) -> None:
    """Count, measure, tell."""
    if bool(paths) == (tokens is not None):
        raise typer.BadParameter("give files and folders, or --tokens")
    if measure and prefill_speed is not None:
        raise typer.BadParameter("give --measure or --prefill-speed, not both")
    with reporting_errors(as_json=as_json):
        from chunkcache.corpus_plan import plan_corpus
        from chunkcache.model_opening import outline_configured_model
        from chunkcache.settings import load_settings

        settings = load_settings(model=model, chunk_tokens=chunk_tokens)
        outline = outline_configured_model(settings, say)
        if tokens is not None:
            corpus = _assumed(tokens, settings.chunk_tokens)
        else:
            corpus = _counted(paths or [], outline, settings.chunk_tokens)
        found = plan_corpus(
            outline.spec,
            outline.dtype,
            corpus,
            prefill_tokens_per_s=_measured(settings) if measure else prefill_speed,
        )
    if as_json:
        print_json({"model": settings.model} | found.to_dict())
    else:
        results.print(_table(found))


def _assumed(num_tokens: int, chunk_tokens: int) -> "CorpusSize":
    """Chunks come out three quarters full, as a rule."""
    from chunkcache.corpus_plan import CorpusSize

    return CorpusSize(0, max(1, num_tokens * 4 // (chunk_tokens * 3)), num_tokens)


def _counted(paths: list[Path], outline: "ModelOutline", chunk_tokens: int) -> "CorpusSize":
    from chunkcache.corpus_plan import CorpusMeter
    from chunkcache.splitting import DocumentSplitter
    from chunkcache.text_files import find_text_files
    from chunkcache_api.cli.opening import progress_lines
    from chunkcache_retriever.file_readers import file_kinds

    meter = CorpusMeter(DocumentSplitter(outline.tokenizer, chunk_tokens))
    with progress_lines("counting tokens"):
        for item in find_text_files(paths, file_kinds()):
            meter.add(item)
    return meter.size()


def _measured(settings: "Settings") -> float:
    """Tokens per second, by a model loaded for it."""
    from chunkcache.calibration import calibrate
    from chunkcache.codecs import codec_by_name
    from chunkcache.model_opening import load_configured_model

    runner = load_configured_model(settings, say).runner
    return 1 / calibrate(runner, codec_by_name("raw", runner.dtype)).prefill_s_per_row


def _table(found: "CorpusPlan") -> Table:
    corpus = found.corpus
    lines = [
        f"{corpus.num_tokens:,} tokens in {corpus.num_chunks:,} chunks"
        + (f" of {corpus.num_documents:,} documents" if corpus.num_documents else "")
    ]
    if corpus.num_unreadable:
        lines.append(f"{corpus.num_unreadable:,} files cannot be cached")
    if found.prefill_s is not None:
        lines.append(
            f"prefilling it once takes {found.prefill_s:,.0f} s at "
            f"{found.prefill_tokens_per_s:,.0f} tokens/s"
        )
    table = Table(title="\n".join(lines), title_justify="left", box=None)
    table.add_column("codec")
    for name in ("bytes/token", "disk", "ms per 1,000 tokens", "break-even prefill", "speed-up"):
        table.add_column(name, justify="right")
    for row in found.codecs:
        table.add_row(
            row.codec,
            f"{row.bytes_per_token:,}",
            size(row.disk_bytes),
            f"{row.load_ms_per_1k_tokens:,.1f}",
            f"{row.break_even_prefill_tokens_per_s:,.0f} tokens/s",
            "-" if row.load_speedup is None else f"{row.load_speedup:,.0f}x",
        )
    return table
