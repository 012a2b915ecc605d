"""Injected faults on the data plane: the same frames and payloads, sent wrongly on purpose.

One question to the injector per frame.  A link waits for each answer before it sends the next
frame, so there is nothing to swap with: `reorder` lets other links overtake, as `delay` does.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from transport.data_socket import Bytes, DataSocket
from transport.faulty import DATA, FaultInjector, corrupted, truncated
from transport.frame import Frame, encode

log = logging.getLogger(__name__)


class FaultySend:
    """Stands in for a link's plain send."""

    def __init__(self, wire: DataSocket, faults: FaultInjector) -> None:
        self._wire = wire
        self._faults = faults

    def __call__(self, frame: Frame, payload: Sequence[Bytes], deadline: float) -> None:
        """Raises OSError, as a plain send does."""
        rule = self._faults.decide(DATA)
        if rule is None:
            return self._send(frame, payload, deadline)
        log.warning("injected fault: %s data frame %d", rule.action, frame.sequence)
        match rule.action:
            case "drop":
                return None
            case "delay" | "reorder":
                time.sleep(rule.delay_s)
            case "duplicate":
                self._send(frame, payload, deadline)
            case "corrupt":
                return self._send(*_corrupt(frame, payload), deadline)
            case "truncate":
                return self._cut(frame, payload, deadline)
            case "kill":
                self._send_half(frame, payload, deadline)
                return self._faults.kill()
        return self._send(frame, payload, deadline)

    def _send(self, frame: Frame, payload: Sequence[Bytes], deadline: float) -> None:
        self._wire.send([encode(frame), *payload], deadline)

    def _cut(self, frame: Frame, payload: Sequence[Bytes], deadline: float) -> None:
        self._send_half(frame, payload, deadline)
        self._wire.finish()

    def _send_half(self, frame: Frame, payload: Sequence[Bytes], deadline: float) -> None:
        """Half the payload after a whole header, or half a header that has no payload."""
        header, body = encode(frame), b"".join(payload)
        half = [header, truncated(body)] if body else [truncated(header)]
        self._wire.send(half, deadline)


def _corrupt(frame: Frame, payload: Sequence[Bytes]) -> tuple[Frame, Sequence[Bytes]]:
    """One wrong byte where only a check of the content can see it; the header stays in order.

    Without a payload (shm) the promise is made wrong instead: a checksum, or a generation.
    """
    if payload:
        return frame, [corrupted(bytes(payload[0])), *payload[1:]]
    if frame.sums:
        return replace(frame, sums=(frame.sums[0] ^ 1, *frame.sums[1:])), payload
    return replace(frame, generations=(frame.generations[0] ^ 1, *frame.generations[1:])), payload
