"""``GET /v1/models``: the one model that is served."""

from typing import Any

import msgspec
from fastapi import APIRouter

from chunkcache_api.routes.current import CurrentService

router = APIRouter(tags=["models"])


@router.get("/v1/models")
async def list_models(service: CurrentService) -> dict[str, Any]:
    """The served model, in OpenAI's form."""
    runtime = service.cache.runtime
    spec, gate = runtime.model.runner.spec, runtime.gate
    model = {
        "id": service.model_name,
        "object": "model",
        "created": int(service.loaded_at),
        "owned_by": "chunkcache",
        "max_positions": spec.max_positions,
        "family": spec.family.name,
        "gate": msgspec.to_builtins(gate),
    }
    return {"object": "list", "data": [model]}
