"""One request's stages as OpenTelemetry spans: counts, names and times, and never any text.

Where a request is looked up is followed as it happens. What the engine did is told from its report:
it works on several requests in turn, so a stage's span is as long as its work took, one stage behind
the other.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from opentelemetry.context import get_current
from opentelemetry.trace import Status, StatusCode, Tracer
from opentelemetry.util.types import AttributeValue

from chunkcache.errors import ChunkCacheError
from chunkcache.results import Answer

PREFIX: Final = "chunkcache."


class RequestTrace:
    """Spans below the one that is current where this is made.

    Args:
        tracer: Makes them.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._parent = get_current()
        self._submitted_ns = 0

    @contextmanager
    def lookup(self) -> Iterator[dict[str, AttributeValue]]:
        """Finding documents and planning, until the engine has the request.

        Gives what is to be filled with the span's attributes. A failure is told by its code.
        """
        found: dict[str, AttributeValue] = {}
        span = self._tracer.start_span("lookup", self._parent)
        try:
            yield found
        except BaseException as error:
            code = error.code if isinstance(error, ChunkCacheError) else type(error).__name__
            span.set_attribute("error.type", code)
            span.set_status(Status(StatusCode.ERROR))
            raise
        finally:
            span.set_attributes(_named(found))
            span.end()
        self._submitted_ns = time.time_ns()

    def answered(self, answers: Sequence[Answer]) -> None:
        """What the engine did for answers to one prompt."""
        report = answers[0].report
        account, timings = report.account, report.timings
        tokens = {f"tokens_{tier}": n for tier, n in account.cached_tokens_by_source.items()}
        stages = [
            ("queue", timings.queue_ms, {}),
            (
                "load",
                timings.load_ms - timings.prefill_ms,
                {"documents": len(report.documents)} | tokens,
            ),
            ("prefill", timings.prefill_ms, {"stored_tokens": account.cache_write_tokens}),
            (
                "fuse",
                timings.place_ms + timings.probe_ms + timings.recompute_ms,
                {
                    "policy": report.policy,
                    "requested_policy": report.requested_policy,
                    "charged_ratio": report.charged_ratio,
                    "fused_tokens": account.fused_tokens,
                    "recomputed_tokens": account.recomputed_tokens,
                    "computed_tokens": account.computed_tokens,
                    "warnings": [warning.code for warning in report.warnings],
                },
            ),
        ]
        start_ns = self._submitted_ns
        for name, spent_ms, attributes in stages:
            self._span(name, start_ns, spent_ms, attributes)
            start_ns += int(spent_ms * 1e6)
        self._span(
            "decode",
            self._submitted_ns + int(timings.ttft_ms * 1e6),
            max(answer.report.timings.decode_ms for answer in answers),
            {
                "answers": len(answers),
                "tokens": sum(len(answer.token_ids) for answer in answers),
                "finish_reasons": [answer.finish_reason for answer in answers],
            },
        )

    def _span(
        self, name: str, start_ns: int, spent_ms: float, attributes: Mapping[str, AttributeValue]
    ) -> None:
        span = self._tracer.start_span(
            name, self._parent, start_time=start_ns, attributes=_named(attributes)
        )
        span.end(start_ns + int(spent_ms * 1e6))


def _named(attributes: Mapping[str, AttributeValue]) -> dict[str, AttributeValue]:
    return {PREFIX + name: value for name, value in attributes.items()}
