"""Every error Trireme raises on purpose.

    TriremeError
    ├── BadRequest            400  the client's fault; names the field; never retried
    │   ├── ModelNotFound     404
    │   └── BodyTooLarge      413
    ├── Overloaded            429  come back after `retry_after_s`
    ├── Unavailable           503  nobody can serve this now
    ├── Refused                -   a worker said no before starting; try the next candidate
    ├── WorkerLost             -   the link to a worker ended; try elsewhere
    ├── DeadlineExceeded      504  a stage ran past its deadline; try elsewhere
    ├── LeaseGone              -   a lease ended (expired, revoked, other epoch); reserve again
    ├── TransferFailed         -   the mover gave up; retry once, else recompute
    ├── Incompatible           -   two workers must not exchange KV; names the field
    ├── ConfigError            -   a setting is unknown or impossible; names the key
    ├── ModelUnsupported       -   the model cannot be loaded; says what is supported
    └── InternalError         500  a broken local invariant

`stage` says where in a request's life it happened, `worker` on whom, `retryable` whether
another try may succeed.  Foreign exceptions become these at one boundary per folder.
"""

from enum import StrEnum
from typing import ClassVar


class Stage(StrEnum):
    """Where in the life of a request something happened."""

    EDGE = "edge"
    QUEUE = "queue"
    RESERVE = "reserve"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    ATTACH = "attach"
    DECODE = "decode"
    START = "start"


class TriremeError(Exception):
    """Base of the tree.  `message` says the cause and what to do about it."""

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        stage: Stage = Stage.EDGE,
        worker: str = "",
        retry_after_s: float = 0.0,
        field: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.stage = stage
        self.worker = worker
        self.retry_after_s = retry_after_s
        self.field = field

    def __str__(self) -> str:
        where = f"{self.stage}@{self.worker}" if self.worker else str(self.stage)
        return f"[{where}] {self.message}"


class BadRequest(TriremeError):
    """The request itself is wrong; `field` names the offending one."""

    code = "bad_request"
    status = 400


class ModelNotFound(BadRequest):
    code = "model_not_found"
    status = 404


class BodyTooLarge(BadRequest):
    code = "body_too_large"
    status = 413


class Overloaded(TriremeError):
    code = "overloaded"
    status = 429
    retryable = True


class Unavailable(TriremeError):
    code = "unavailable"
    status = 503
    retryable = True


class Refused(TriremeError):
    code = "refused"
    status = 503
    retryable = True


class WorkerLost(TriremeError):
    code = "worker_lost"
    status = 502
    retryable = True


class DeadlineExceeded(TriremeError):
    code = "deadline_exceeded"
    status = 504
    retryable = True


class LeaseGone(TriremeError):
    code = "lease_gone"
    status = 502
    retryable = True


class TransferFailed(TriremeError):
    code = "transfer_failed"
    status = 502
    retryable = True


class Incompatible(TriremeError):
    code = "incompatible"


class ConfigError(TriremeError):
    code = "config_error"
    status = 400


class ModelUnsupported(TriremeError):
    code = "model_unsupported"


class InternalError(TriremeError):
    code = "internal_error"


def _tree(root: type[TriremeError]) -> dict[str, type[TriremeError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


BY_CODE: dict[str, type[TriremeError]] = _tree(TriremeError)
"""Code on the wire -> class, so that an error keeps its type across processes."""
