"""``/v1/models``: the one model that is served, and having it loaded again."""

from dataclasses import asdict
from typing import Any, Final

import msgspec
from anyio import to_thread
from fastapi import APIRouter, Request
from pydantic import BaseModel

from chunkcache.probing import stored_fidelity
from chunkcache.runtime import Runtime
from chunkcache_api.answering import check_model
from chunkcache_api.json_body import body_schema, read_body
from chunkcache_api.routes.current import CurrentService, service_state
from chunkcache_api.service import Service

HINT: Final = "not measured with these settings; run: chunkcache doctor"

router = APIRouter(tags=["models"])


@router.get("/v1/models")
async def list_models(service: CurrentService) -> dict[str, Any]:
    """The served model, in OpenAI's form, and how close its fused answers are to full prefills.

    ``fidelity`` is null until ``chunkcache doctor`` has measured the model with the settings in
    force; ``fidelity_hint`` then says so.
    """
    return {"object": "list", "data": [await _model_body(service)]}


@router.get("/v1/models/{model:opaque}")
async def get_model(model: str, service: CurrentService) -> dict[str, Any]:
    """The served model, by its name."""
    check_model(service, model)
    return await _model_body(service)


async def _model_body(service: Service) -> dict[str, Any]:
    runtime = service.cache.runtime
    spec, gate = runtime.model.runner.spec, runtime.gate
    fidelity = await to_thread.run_sync(_fidelity, runtime, limiter=service.quick_threads)
    return {
        "id": service.model_name,
        "object": "model",
        "created": int(service.loaded_at),
        "owned_by": "chunkcache",
        "max_positions": spec.max_positions,
        "family": spec.family.name,
        **runtime.model.weights_facts(),
        "gate": msgspec.to_builtins(gate),
        "fidelity": fidelity,
        "fidelity_hint": HINT if fidelity is None else None,
    }


class ReloadRequest(BaseModel):
    """Takes no fields: what is loaded is what the settings name."""


@router.post("/v1/models/reload", openapi_extra=body_schema(ReloadRequest))
async def reload_model(request: Request, service: CurrentService) -> dict[str, Any]:
    """Load the served model again, if its files (or its adapter's) have changed.

    Answers when the new model serves and the old one has finished what it had begun. The old one
    serves until then, and goes on if the new one cannot be loaded or fails the gate (409
    ``reload_failed``).
    """
    await read_body(request, ReloadRequest)
    state = service_state(request)
    result = await to_thread.run_sync(state.reload, limiter=service.prefill_threads)
    return {"object": "chunkcache.model_reload", **asdict(result)}


def _fidelity(runtime: Runtime) -> dict[str, Any] | None:
    report = stored_fidelity(runtime)
    if report is None:
        return None
    return msgspec.to_builtins(report) | {"closeness": report.closeness}
