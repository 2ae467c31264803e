"""The open service as the tenant of a request sees it, as a route's argument."""

from typing import Annotated

from fastapi import Depends, Request

from chunkcache_api.service import Service, ServiceState


def service_state(request: Request) -> ServiceState:
    """The application's state, open or not."""
    return request.app.state.service


async def current_service(request: Request) -> Service:
    """The open service, as the request's tenant sees it. The tenant comes from the key alone.

    Raises:
        ChunkCacheError: It is not open.
    """
    return service_state(request).require_for(request.state.principal)


CurrentService = Annotated[Service, Depends(current_service)]
