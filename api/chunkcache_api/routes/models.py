"""``GET /v1/models``: the one model that is served."""

from typing import Any, Final

import msgspec
from anyio import to_thread
from fastapi import APIRouter

from chunkcache.probing import stored_fidelity
from chunkcache.runtime import Runtime
from chunkcache_api.routes.current import CurrentService

HINT: Final = "not measured with these settings; run: chunkcache doctor"

router = APIRouter(tags=["models"])


@router.get("/v1/models")
async def list_models(service: CurrentService) -> dict[str, Any]:
    """The served model, in OpenAI's form, and how close its fused answers are to full prefills.

    ``fidelity`` is null until ``chunkcache doctor`` has measured the model with the settings in
    force; ``fidelity_hint`` then says so.
    """
    runtime = service.cache.runtime
    spec, gate = runtime.model.runner.spec, runtime.gate
    fidelity = await to_thread.run_sync(_fidelity, runtime, limiter=service.quick_threads)
    model = {
        "id": service.model_name,
        "object": "model",
        "created": int(service.loaded_at),
        "owned_by": "chunkcache",
        "max_positions": spec.max_positions,
        "family": spec.family.name,
        "gate": msgspec.to_builtins(gate),
        "fidelity": fidelity,
        "fidelity_hint": HINT if fidelity is None else None,
    }
    return {"object": "list", "data": [model]}


def _fidelity(runtime: Runtime) -> dict[str, Any] | None:
    report = stored_fidelity(runtime)
    if report is None:
        return None
    return msgspec.to_builtins(report) | {"closeness": report.closeness}
