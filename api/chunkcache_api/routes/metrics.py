"""``GET /metrics``: for Prometheus. It answers while the model is being loaded too."""

from anyio import to_thread
from fastapi import APIRouter, Request
from prometheus_client.exposition import choose_encoder
from starlette.responses import Response

router = APIRouter(tags=["health"])


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Every figure, in the text form that the client accepts."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    # On a thread: the store is asked how full it is.
    text = await to_thread.run_sync(encode, request.app.state.metrics)
    return Response(text, headers={"content-type": content_type})
