"""Errors that only the API meets; the core's own are in ``chunkcache.errors``.

::

    ChunkCacheError
    ├── InvalidApiKeyError         invalid_api_key         401
    ├── InsufficientScopeError     insufficient_scope      403
    ├── ModelNotFoundError         model_not_found         404
    ├── RequestNotFoundError       request_not_found       404
    ├── JobNotFoundError           job_not_found           404
    ├── ReloadFailedError          reload_failed           409
    ├── BodyTooLargeError          body_too_large          413
    ├── UnsupportedMediaTypeError  unsupported_media_type  415
    ├── ModelLoadingError          model_loading           503
    └── KeysFileError              keys_file               503
"""

from chunkcache.errors import ChunkCacheError


class InvalidApiKeyError(ChunkCacheError):
    """A request needs an API key, and has none that is valid."""

    code = "invalid_api_key"
    status = 401


class InsufficientScopeError(ChunkCacheError):
    """A request's key is valid, and does not allow what is asked."""

    code = "insufficient_scope"
    status = 403


class ModelNotFoundError(ChunkCacheError):
    """A request names a model that is not the one served."""

    code = "model_not_found"
    status = 404


class RequestNotFoundError(ChunkCacheError):
    """No account of such a request is kept."""

    code = "request_not_found"
    status = 404


class JobNotFoundError(ChunkCacheError):
    """There is no such job of this tenant, or it is not told of any more."""

    code = "job_not_found"
    status = 404


class ReloadFailedError(ChunkCacheError):
    """The model could not be loaded again; the one that was loaded before goes on serving."""

    code = "reload_failed"
    status = 409


class BodyTooLargeError(ChunkCacheError):
    """A body is over the limit; it was not read to its end."""

    code = "body_too_large"
    status = 413


class UnsupportedMediaTypeError(ChunkCacheError):
    """A body is not declared as JSON."""

    code = "unsupported_media_type"
    status = 415


class ModelLoadingError(ChunkCacheError):
    """The model is still being loaded; try again later."""

    code = "model_loading"
    status = 503


class KeysFileError(ChunkCacheError):
    """The file of API keys cannot be used. No client meets it."""

    code = "keys_file"
    status = 503
