"""Where spans go: over OTLP, to the address that OpenTelemetry's own environment variables name."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING

from chunkcache.errors import InvalidValueError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


@contextmanager
def exported_spans() -> Iterator["TracerProvider"]:
    """A provider whose spans are sent in the background, and before the block ends.

    Raises:
        InvalidValueError: The extra ``otel`` is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise InvalidValueError(
            "tracing needs the extra otel: pip install 'chunkcache[otel]'", param="tracing"
        ) from error
    own = Resource({"service.name": "chunkcache", "service.version": version("chunkcache")})
    # What the environment says of the service counts more.
    provider = TracerProvider(resource=own.merge(OTELResourceDetector().detect()))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    try:
        yield provider
    finally:
        provider.shutdown()
