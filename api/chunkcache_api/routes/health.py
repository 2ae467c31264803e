"""``/livez``, ``/readyz``, ``/version``: for whoever runs the server."""

from importlib.metadata import version

from fastapi import APIRouter

from chunkcache_api.routes.current import CurrentService

router = APIRouter(tags=["health"])


@router.get("/livez")
async def livez() -> dict[str, str]:
    """Whether the process answers; says nothing of the model."""
    return {"status": "ok"}


@router.get("/readyz")
async def readyz(service: CurrentService) -> dict[str, str]:
    """Whether requests are served; 503 while the model is being loaded."""
    return {"status": "ready", "model": service.model_name}


@router.get("/version")
async def server_version() -> dict[str, str]:
    """The release that runs."""
    return {"name": "chunkcache", "version": version("chunkcache")}
