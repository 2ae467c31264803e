"""``chunkcache eval service``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chunkcache_api.cli.console import print_json, reporting_errors, results, say
from chunkcache_api.cli.help_text import help_text
from chunkcache_api.cli.options import JsonOption

if TYPE_CHECKING:
    from chunkcache_eval.datasets.records import Question

HELP = help_text(
    """Put a server under load: fused answers beside full prefills, over HTTP.

    Starts a server of its own on this machine's loopback address, over a store that is removed
    afterwards, and stores documents made from a question set. Clients ask at once; popular
    documents are asked about most (Zipf), 3 to 8 of them each time. Both sides are asked the same,
    in turn. One request comes again and again: its answers, logits included, should all be the
    same. Bounded in count and time.""",
    "chunkcache eval service --data questions.jsonl",
    "chunkcache eval service --data questions.jsonl --clients 8 --json",
)


def register(eval_app: typer.Typer) -> None:
    """Add the command."""
    eval_app.command("service", help=HELP)(service)


def service(
    data: Annotated[
        list[Path] | None,
        typer.Option(help="Question sets (JSONL). Without one, the demo corpus is used."),
    ] = None,
    documents: Annotated[int, typer.Option(min=3, help="Largest number of documents.")] = 200,
    document_chars: Annotated[
        int, typer.Option(min=1, help="Characters that a document has at least.")
    ] = 1600,
    clients: Annotated[int, typer.Option(min=1, max=256, help="Clients at once.")] = 32,
    requests: Annotated[int, typer.Option(min=1, max=100_000, help="Requests of each side.")] = 96,
    seconds: Annotated[
        float, typer.Option(min=1, max=3_600, help="Largest time of each side.")
    ] = 300.0,
    rounds: Annotated[int, typer.Option(min=1, help="How often the sides take turns.")] = 2,
    max_tokens: Annotated[int, typer.Option(min=1, help="Answer tokens.")] = 8,
    repeat_every: Annotated[
        int, typer.Option(min=2, help="Every so manieth request is the same one.")
    ] = 4,
    seed: Annotated[int, typer.Option(help="Seed of what is drawn.")] = 0,
    model: Annotated[str | None, typer.Option(help="Model to serve.")] = None,
    policy: Annotated[str | None, typer.Option(help="Policy of the fused side.")] = None,
    ratio: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Its recompute ratio.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Start, load, print."""
    with reporting_errors(as_json=as_json):
        from chunkcache_eval.service.report import service_table
        from chunkcache_eval.service.run import LoadPlan, measure_service
        from chunkcache_eval.service.server import running_server
        from chunkcache_eval.service.workload import make_documents, make_workload

        questions = _questions(data)
        workload = make_workload(
            questions,
            make_documents(questions, documents, document_chars),
            num_requests=requests,
            repeat_every=repeat_every,
            seed=seed,
        )
        given = {"--model": model, "--policy": policy, "--ratio": ratio}
        options = [part for name, v in given.items() if v is not None for part in (name, str(v))]
        say("starting a server")
        with running_server(options) as base_url:
            plan = LoadPlan(clients, max_tokens, rounds, seconds)
            report = measure_service(base_url, workload, plan, say)
    if as_json:
        print_json(report.to_dict())
    else:
        results.print(service_table(report))
        results.print(
            f"health p99 {report.health_p99_ms:,.0f} ms; overhead {report.overhead_ms:,.1f} ms "
            f"(one client alone {report.idle_overhead_ms:,.1f} ms); left over: "
            f"{report.leaked_pages} pages, {report.leaked_leases} leases, "
            f"{report.leaked_requests} requests"
        )
        for reason in report.failures:
            say(f"failed: {reason}")


def _questions(data: list[Path] | None) -> "list[Question]":
    from chunkcache_eval.datasets.records import demo_questions, read_questions

    if data:
        return [question for path in data for question in read_questions(path)]
    return demo_questions()
