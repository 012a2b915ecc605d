"""In-flight tokens per worker: the router's own, never stale, measure of load.

Keyed by (worker, epoch): what is released late for a dead incarnation cannot make its
successor's count wrong.
"""

from core.ids import Epoch, WorkerId


class Hold:
    """Tokens counted against one worker until `release`, which is idempotent."""

    __slots__ = ("_key", "_ledger", "_tokens")

    def __init__(self, ledger: "Ledger", key: tuple[WorkerId, Epoch], tokens: int) -> None:
        self._ledger = ledger
        self._key = key
        self._tokens = tokens

    def release(self) -> None:
        tokens, self._tokens = self._tokens, 0
        self._ledger._add(self._key, -tokens)


class Ledger:
    """Sums of all holds.  A worker without any is absent."""

    def __init__(self) -> None:
        self._tokens: dict[tuple[WorkerId, Epoch], int] = {}

    def hold(self, worker_id: WorkerId, epoch: Epoch, tokens: int) -> Hold:
        """Count `tokens`; the caller owns the hold and releases it on every way out."""
        key = (worker_id, epoch)
        self._add(key, tokens)
        return Hold(self, key, tokens)

    def load(self, worker_id: WorkerId, epoch: Epoch) -> int:
        return self._tokens.get((worker_id, epoch), 0)

    def snapshot(self) -> dict[WorkerId, int]:
        """In-flight tokens per worker, over all its incarnations."""
        totals: dict[WorkerId, int] = {}
        for (worker_id, _), tokens in self._tokens.items():
            totals[worker_id] = totals.get(worker_id, 0) + tokens
        return totals

    def _add(self, key: tuple[WorkerId, Epoch], tokens: int) -> None:
        left = self._tokens.get(key, 0) + tokens
        if left:
            self._tokens[key] = left
        else:
            self._tokens.pop(key, None)
