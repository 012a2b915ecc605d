"""Which backends to try between two processes, best first.  Pure."""

from collections.abc import Sequence

from core.errors import ConfigError, Stage
from core.messages import DataEndpoint, HostFacts


def choose(
    mine: HostFacts, theirs: HostFacts, endpoints: Sequence[DataEndpoint], preference: str
) -> tuple[str, ...]:
    """Backend names in the order to try them; a forced one is the only one.

    Opening the link verifies each; whoever steps down to the next says so.
    Raises ConfigError on transport.mover when nothing, or not the forced one, can work.
    """
    offered = {e.mover for e in endpoints}
    obstacles = {
        "shm": _shm_obstacle(mine, theirs, offered),
        "tcp": _missing("tcp", offered),
    }
    wanted = tuple(obstacles) if preference == "auto" else (preference,)
    able = tuple(m for m in wanted if not obstacles.get(m, "this version has no such backend"))
    if able:
        return able
    why = "; ".join(f"{m}: {obstacles.get(m, 'this version has no such backend')}" for m in wanted)
    raise ConfigError(
        f"transport.mover: {preference} cannot join these workers ({why}); "
        "set it to auto on both sides",
        stage=Stage.START,
        field="transport.mover",
    )


def _shm_obstacle(mine: HostFacts, theirs: HostFacts, offered: set[str]) -> str:
    if not mine.boot_id or mine.boot_id != theirs.boot_id:
        return f"not the same host (boot ids {mine.boot_id!r}, {theirs.boot_id!r})"
    if mine.uid != theirs.uid:
        return f"not the same user ({mine.uid}, {theirs.uid})"
    return _missing("shm", offered)


def _missing(mover: str, offered: set[str]) -> str:
    return "" if mover in offered else f"the peer does not listen on {mover}"
