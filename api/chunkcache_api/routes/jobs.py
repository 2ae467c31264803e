"""``/v1/precache`` and ``/v1/jobs``: work that goes on whether or not anybody is connected."""

from functools import partial
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from chunkcache.text_files import TextItem
from chunkcache_api.jobs import PrecacheJobs
from chunkcache_api.json_body import body_schema, json_response, read_body
from chunkcache_api.paging import Page, page_body
from chunkcache_api.routes.current import CurrentService
from chunkcache_api.routes.threads import on_thread
from chunkcache_api.schemas.jobs import CancelRequest, ListJobsParams, PrecacheRequest

ACCEPTED: Final = 202

router = APIRouter(tags=["jobs"])


@router.post("/v1/precache", status_code=ACCEPTED, openapi_extra=body_schema(PrecacheRequest))
async def precache(request: Request, service: CurrentService) -> Response:
    """Have documents cached by a job, which outlives the connection; 202 with the job.

    Jobs of a tenant run one at a time, and leave the engine to questions while some are open.
    """
    body = await read_body(request, PrecacheRequest)
    return await on_thread(service.quick_threads, partial(_submit, service.jobs, body))


@router.get("/v1/jobs")
async def list_jobs(
    params: Annotated[ListJobsParams, Query()], service: CurrentService
) -> Response:
    """A page of jobs, the newest first; the server forgets them when it stops."""
    page = Page(params.limit, params.order, params.after)
    jobs = service.jobs.list()
    return json_response(
        page_body(jobs, page, lambda job: (job["created_at"], job["id"]), lambda job: job)
    )


@router.get("/v1/jobs/{id}")
async def get_job(id: str, service: CurrentService) -> Response:
    """A job: how far it is, and what came of it."""
    return json_response(service.jobs.get(id))


@router.post("/v1/jobs/{id}/cancel", openapi_extra=body_schema(CancelRequest, is_required=False))
async def cancel_job(id: str, request: Request, service: CurrentService) -> Response:
    """End a job behind the chunk that it is at; what it has cached is kept."""
    if await request.body():
        await read_body(request, CancelRequest)
    return json_response(service.jobs.cancel(id))


def _submit(jobs: PrecacheJobs, body: PrecacheRequest) -> Response:
    items = [TextItem(d.id, d.text, d.metadata, d.format) for d in body.documents or ()]
    job = jobs.submit(items, body.document_ids)
    response = json_response(job, ACCEPTED)
    response.headers["location"] = f"/v1/jobs/{job['id']}"
    return response
