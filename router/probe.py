"""Readiness that means something: a real token through a real path, not an open port."""

import asyncio
from collections.abc import Callable

from core.clock import Clock
from core.errors import Overloaded, TriremeError
from core.ids import RequestId
from core.sampling import Sampling
from router.edge import ReadyState
from router.request import Generate, Generator

_FRESH_S = 5.0
_TOKENS = 2
"""The first comes from prefill, the second only after the KV has moved and was attached to."""


class Probe:
    """`EdgeContext.ready`.  A verdict is kept for 5 s; callers meanwhile share one probe."""

    def __init__(
        self,
        generator: Generator,
        prompt: tuple[int, ...],
        new_id: Callable[[], str],
        clock: Clock,
    ) -> None:
        self._generator = generator
        self._prompt = prompt
        self._new_id = new_id
        self._clock = clock
        self._lock = asyncio.Lock()
        self._verdict: tuple[float, ReadyState] | None = None

    async def __call__(self) -> ReadyState:
        async with self._lock:
            now = self._clock()
            if self._verdict is None or now - self._verdict[0] > _FRESH_S:
                self._verdict = (now, await self._run())
            return self._verdict[1]

    def expire(self) -> None:
        """Membership changed: the next caller gets a new verdict."""
        self._verdict = None

    async def _run(self) -> ReadyState:
        sampling = Sampling(max_tokens=_TOKENS, ignore_eos=True)
        request = Generate(RequestId(f"ready-{self._new_id()}"), self._prompt, sampling)
        try:
            generation = await self._generator.generate(request)
            async for _ in generation:
                pass
        except Overloaded:
            return ReadyState(True, "busy: every worker refused the probe for now")
        except TriremeError as e:
            return ReadyState(False, str(e))
        return ReadyState(True)
