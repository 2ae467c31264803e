"""``/livez``, ``/readyz`` (and ``/health``), ``/version``: for whoever runs the server."""

from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request

from chunkcache_api.auth.access import Gatekeeper
from chunkcache_api.routes.current import CurrentService

router = APIRouter(tags=["health"])


@router.get("/livez")
async def livez() -> dict[str, str]:
    """Whether the process answers; says nothing of the model."""
    return {"status": "ok"}


@router.get("/health")
@router.get("/readyz")
async def readyz(request: Request, service: CurrentService) -> dict[str, Any]:
    """Whether requests are served; 503 while the model is being loaded.

    ``warnings`` says what the operator should look at.
    """
    gatekeeper: Gatekeeper = request.app.state.gatekeeper
    warnings = ["keys_file_unreadable"] if gatekeeper.keys.stats().is_stale else []
    return {"status": "ready", "model": service.model_name, "warnings": warnings}


@router.get("/version")
async def server_version() -> dict[str, str]:
    """The release that runs."""
    return {"name": "chunkcache", "version": version("chunkcache")}
