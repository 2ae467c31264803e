"""A request's work as a response: whole, streamed, or a dry run."""

from fastapi import Request
from starlette.responses import Response

from chunkcache_api.answering import AnswerWork, Completed
from chunkcache_api.disconnect import cancelled_on_disconnect
from chunkcache_api.json_body import json_response
from chunkcache_api.server_timing import HEADER, timing_value
from chunkcache_api.service import Service
from chunkcache_api.sse import EventEncoder, EventStreamResponse


async def answer_response(
    request: Request,
    service: Service,
    work: AnswerWork,
    *,
    encoder: EventEncoder | None,
    is_dry_run: bool,
) -> Response:
    """Run the work; the client's leaving ends it.

    Args:
        request: What came, read to its end.
        service: Where the work runs.
        work: The work.
        encoder: Frames the events of a stream; None answers as a whole.
        is_dry_run: Whether only the plan is wanted.
    """
    if encoder is not None:
        return EventStreamResponse(service, work, encoder)
    produce = work.plan if is_dry_run else work.answer
    with (
        service.workers.start(produce, service.claims) as worker,
        cancelled_on_disconnect(worker, request.receive),
    ):
        async for event in worker:
            if isinstance(event, Completed):
                response = json_response(event.body)
                if not is_dry_run:
                    response.raw_headers.append((HEADER, timing_value(event.timings)))
                return response
    raise AssertionError("a request ended without its answer")
