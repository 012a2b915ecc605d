"""Identifiers.  Plain strings and integers with distinct static types."""

from typing import NamedTuple, NewType

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
LeaseId = NewType("LeaseId", str)
BlockId = NewType("BlockId", int)
BlockHash = NewType("BlockHash", bytes)
Epoch = NewType("Epoch", int)
"""Incarnation of a worker: a restarted worker has a larger epoch and is a new worker."""


class AttemptKey(NamedTuple):
    """One try at serving one request; everything a worker holds for it is filed under this key.

    A retry is a new attempt, so that a late message of an earlier try can never be taken
    for one of the current try.
    """

    request_id: RequestId
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}#{self.attempt}"
