"""Live attempts by key: brings every event of a worker to the attempt that waits for it."""

from core.ids import AttemptKey, Epoch, WorkerId
from core.messages import AttemptFailed, PrefillDone, StepEvents
from core.ports import WorkerPort
from router.attempt import Attempt
from router.counters import Counters


class Table:
    def __init__(self, counters: Counters) -> None:
        self._attempts: dict[AttemptKey, Attempt] = {}
        self._counters = counters

    def add(self, attempt: Attempt) -> None:
        self._attempts[attempt.key] = attempt

    def remove(self, attempt: Attempt) -> None:
        """What still comes for it is ignored, and counted, from now on."""
        del self._attempts[attempt.key]

    def route(self, worker_id: WorkerId, event: StepEvents | PrefillDone | AttemptFailed) -> None:
        match event:
            case StepEvents():
                for tokens in event.events:
                    if attempt := self._find(tokens.key):
                        attempt.on_tokens(worker_id, tokens)
            case PrefillDone():
                if attempt := self._find(event.key):
                    attempt.on_prefilled(worker_id, event)
            case AttemptFailed():
                if attempt := self._find(event.key):
                    attempt.on_failed(worker_id, event.fault.error())

    def lost(self, worker_id: WorkerId, epoch: Epoch, reason: str) -> None:
        """Fail every attempt that has a leg on this incarnation of the worker."""
        for attempt in self._attempts.values():
            port = attempt.legs.get(worker_id)
            if port is not None and port.info.epoch == epoch:
                attempt.on_lost(worker_id, reason)

    def wanted(self) -> list[tuple[WorkerPort, tuple[AttemptKey, ...]]]:
        """Per session, the attempts that shall live on."""
        keys: dict[int, list[AttemptKey]] = {}
        ports: dict[int, WorkerPort] = {}
        for attempt in self._attempts.values():
            for port in attempt.legs.values():
                ports[id(port)] = port
                keys.setdefault(id(port), []).append(attempt.key)
        return [(ports[i], tuple(of_port)) for i, of_port in keys.items()]

    def _find(self, key: AttemptKey) -> Attempt | None:
        attempt = self._attempts.get(key)
        if attempt is None:
            self._counters.unknown_events += 1
        return attempt
