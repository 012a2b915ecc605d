"""Where an edge hears who serves: the contract between supervisor and ingress.  Light to import."""

from typing import Protocol, TypeAlias

from core.messages import WorkerInfo

Members: TypeAlias = tuple[WorkerInfo, ...] | None
"""The workers that serve; None when the cluster closes and every request must end now."""


class Feed(Protocol):
    """Membership, wherever it comes from."""

    async def watch(self, version: int, timeout_s: float) -> tuple[int, Members]:
        """(version, members) once the version differs from `version`, or after `timeout_s`."""
        ...
