"""Every error a caller can cause or meet, each with a stable code.

The tree (code, HTTP status)::

    ChunkCacheError
    ├── InvalidValueError           invalid_value            400
    │   ├── EmptyDocumentError      empty_document           400
    │   ├── UnsupportedParameterError  unsupported_parameter 400
    │   └── NotCalibratedError      not_calibrated           400
    ├── ContextLengthExceededError  context_length_exceeded  400
    ├── PackError                   pack_invalid             400
    │   └── ForeignPackError        pack_foreign             409
    ├── DocumentNotFoundError       document_not_found       404
    ├── CollectionNotFoundError     collection_not_found     404
    ├── DigestMismatchError         digest_mismatch          409
    ├── ReloadInProgressError       reload_in_progress       409
    ├── CacheMissError              cache_miss               422
    ├── QueueFullError              queue_full               429
    ├── RequestCancelledError       request_cancelled        499
    ├── EngineFailedError           internal_error           500
    ├── MissingExtraError           missing_extra            501
    ├── DrainingError               draining                 503
    ├── StoreError                  store_error              503
    │   ├── StoreFormatError        store_format             503
    │   ├── StoreLockedError        store_locked             503
    │   ├── StoreReadOnlyError      store_read_only          403
    │   └── StoreFullError          store_full               507
    │       └── QuotaExceededError  quota_exceeded           507
    ├── PinLimitError               pin_limit                507
    ├── RemoteServerError           remote_error             502
    ├── ServerUnreachableError      server_unreachable       503
    └── ModelError                  model_error              503
        ├── UnsupportedModelError   unsupported_model        503
        ├── ModelFilesError         model_files              503
        └── GateFailedError         gate_failed              503

Messages carry values a caller needs and never a traceback or another tenant's data.
"""

from typing import ClassVar


class ChunkCacheError(Exception):
    """Root of the tree; ``code`` is stable across releases, ``status`` is its HTTP status.

    Args:
        message: One sentence for a person, with the values that matter.
        param: The request field at fault, where there is one.
    """

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidValueError(ChunkCacheError):
    """A request field or setting holds a value that is out of range or of the wrong form."""

    code = "invalid_value"
    status = 400


class EmptyDocumentError(InvalidValueError):
    """A document holds nothing to cache once text rules are applied."""

    code = "empty_document"


class UnsupportedParameterError(InvalidValueError):
    """A known request field asks for something that this build does not do."""

    code = "unsupported_parameter"


class NotCalibratedError(InvalidValueError):
    """A policy needs measurements of the model in use that nobody has made yet."""

    code = "not_calibrated"


class ContextLengthExceededError(ChunkCacheError):
    """The assembled prompt (plus the answer asked for) does not fit the model or the page pool."""

    code = "context_length_exceeded"
    status = 400


class PackError(ChunkCacheError):
    """A corpus pack is not one, or holds something that it may not; nothing of that was kept."""

    code = "pack_invalid"
    status = 400


class ForeignPackError(PackError):
    """A corpus pack was made with another model, tokenizer or format than this store is used with."""

    code = "pack_foreign"
    status = 409


class DocumentNotFoundError(ChunkCacheError):
    """No such document for this tenant; another tenant's document gives the same error."""

    code = "document_not_found"
    status = 404


class CollectionNotFoundError(ChunkCacheError):
    """No such collection for this tenant; another tenant's collection gives the same error."""

    code = "collection_not_found"
    status = 404


class DigestMismatchError(ChunkCacheError):
    """The caller's expected digest is not the digest of what is stored."""

    code = "digest_mismatch"
    status = 409


class ReloadInProgressError(ChunkCacheError):
    """The model is being reloaded already."""

    code = "reload_in_progress"
    status = 409


class CacheMissError(ChunkCacheError):
    """A chunk is not cached and the request said ``on_miss: error``."""

    code = "cache_miss"
    status = 422


class QueueFullError(ChunkCacheError):
    """The engine's queue is at its limit; try again later."""

    code = "queue_full"
    status = 429


class RequestCancelledError(ChunkCacheError):
    """The request was cancelled by its caller before it finished."""

    code = "request_cancelled"
    status = 499


class EngineFailedError(ChunkCacheError):
    """A request failed inside the engine by a fault of ours."""


class MissingExtraError(ChunkCacheError):
    """What is asked needs a package that is not installed; the message names the extra."""

    code = "missing_extra"
    status = 501


class DrainingError(ChunkCacheError):
    """The engine is stopping and takes no further requests."""

    code = "draining"
    status = 503


class StoreError(ChunkCacheError):
    """The store cannot be used as asked."""

    code = "store_error"
    status = 503


class StoreFormatError(StoreError):
    """The store was written by another format version, or is damaged as a whole."""

    code = "store_format"


class StoreLockedError(StoreError):
    """Another process holds the store in a mode that excludes this one."""

    code = "store_locked"


class StoreReadOnlyError(StoreError):
    """The store was opened for reading alone, and this would change it."""

    code = "store_read_only"
    status = 403


class StoreFullError(StoreError):
    """Neither the map nor the disk has room; nothing of the failed write was kept."""

    code = "store_full"
    status = 507


class QuotaExceededError(StoreFullError):
    """The tenant's documents would take more than its quota; nothing of the write was kept."""

    code = "quota_exceeded"


class PinLimitError(ChunkCacheError):
    """Pins would hold more of the RAM budget than their share, or than can be freed."""

    code = "pin_limit"
    status = 507


class RemoteServerError(ChunkCacheError):
    """A server that was asked answered something that has no error of its own here.

    Args:
        message: As for every error.
        remote_code: The code that the server gave, if it gave one.
    """

    code = "remote_error"
    status = 502

    def __init__(
        self, message: str, *, param: str | None = None, remote_code: str | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.remote_code = remote_code


class ServerUnreachableError(ChunkCacheError):
    """A server that was to be asked cannot be reached, or broke off."""

    code = "server_unreachable"
    status = 503


class ModelError(ChunkCacheError):
    """The model cannot be used as asked."""

    code = "model_error"
    status = 503


class UnsupportedModelError(ModelError):
    """The model's family, or a property of it, is not supported; the message names which."""

    code = "unsupported_model"


class ModelFilesError(ModelError):
    """A model directory lacks a file, or holds one that cannot be read."""

    code = "model_files"


class GateFailedError(ModelError):
    """The start-up gate found that this model's reuse path does not reproduce its plain forward."""

    code = "gate_failed"


def error_of_code(code: str) -> type[ChunkCacheError] | None:
    """The error of this module that a stable code names; None for any other code."""
    pending = [ChunkCacheError]
    while pending:
        kind = pending.pop()
        pending.extend(kind.__subclasses__())
        if kind is not ChunkCacheError and kind.__module__ == __name__ and kind.code == code:
            return kind
    return None
