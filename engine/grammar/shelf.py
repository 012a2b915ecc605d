"""The compiled grammars of one worker: which are ready, on their way, or not to be had.

scheduler ── state ────▶ ┌──────────────┐ ── grammar ──▶ lanes: threads with a `Compiler` each
book ────── matcher ───▶ │ GrammarShelf │ ◀── compiled, or why not ──┘
                         └──────────────┘
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import LifoQueue

from core.errors import BadRequest, DeadlineExceeded, InternalError, Stage, TriremeError
from core.sampling import MAX_GRAMMAR_BYTES, Grammar
from engine.grammar.matching import Compiled, Compiler, Matcher
from engine.grammar.rejection import rejected
from engine.policy.grammars import PENDING, READY, GrammarState

COMPILED_BYTES = 16 << 20
SHELF_BYTES = 256 << 20
SHELF_GRAMMARS = 1024
WAIT_S = 60.0
IN_USE_S = 60.0
"""One asked for within this time may be needed by the next step; that makes it the longest step."""


@dataclass(slots=True)
class _Entry:
    """compiled: None while there is no room to compile it.  since: when it was first asked for, or
    began to be compiled.  asked: the last time.  condemned: it compiles, and is of no use."""

    since: float
    asked: float
    compiled: Future[Compiled] | None = None
    condemned: TriremeError | None = None

    @property
    def nbytes(self) -> int:
        """Of memory; what is being compiled lies elsewhere."""
        done = self.compiled is not None and self.compiled.done()
        if self.compiled is None or not done or self.compiled.exception() is not None:
            return 0
        return self.compiled.result().nbytes


class GrammarShelf:
    """`engine.policy.grammars.GrammarPort`.  For the engine's thread; `close` for any.

    Least recently used grammars make room for others, those in use never.
    """

    def __init__(self, compilers: Sequence[Compiler]) -> None:
        """compilers: as many grammars are compiled at once."""
        self._entries: OrderedDict[Grammar, _Entry] = OrderedDict()
        self._compilers = tuple(compilers)
        self._idle: LifoQueue[Compiler] = LifoQueue()
        for compiler in reversed(compilers):
            self._idle.put(compiler)
        self._lanes = ThreadPoolExecutor(len(compilers), thread_name_prefix="grammar")
        self._changed: Callable[[], None] = _nobody

    def bind(self, changed: Callable[[], None]) -> None:
        """changed: called, on any thread, when a state has changed."""
        self._changed = changed

    def state(self, grammar: Grammar, now: float) -> GrammarState:
        """A grammar that is at fault stays so; any other failure is told once, then forgotten."""
        entry = self._entries.setdefault(grammar, _Entry(now, now))
        self._entries.move_to_end(grammar)
        entry.asked = now
        if entry.compiled is None and self._has_room(now):
            entry.since, entry.compiled = now, self._begin(grammar)
        state = _judge(entry, now)
        passing = state.error is not None and not isinstance(state.error, BadRequest)
        if passing and (entry.compiled is None or entry.compiled.done()):
            del self._entries[grammar]
        return state

    def matcher(self, grammar: Grammar) -> Matcher:
        """For one that was ready before this step.  Raises InternalError for any other."""
        entry = self._entries.get(grammar)
        if entry is None or entry.compiled is None or not entry.compiled.done():
            raise InternalError("a step has come to a grammar that is not compiled; report this")
        return entry.compiled.result().matcher()

    def condemn(self, grammar: Grammar, why: str) -> None:
        """Whoever asks for it from now on hears that it cannot be served."""
        self._entries[grammar].condemned = rejected(grammar, why)

    def close(self) -> None:
        """What is being compiled fails."""
        self._lanes.shutdown(wait=False, cancel_futures=True)
        for compiler in self._compilers:
            compiler.close()

    def _has_room(self, now: float) -> bool:
        """After letting go of the least recently used ones that nobody uses now."""
        used = sum(entry.nbytes for entry in self._entries.values())
        while used > SHELF_BYTES or len(self._entries) > SHELF_GRAMMARS:
            grammar, oldest = next(iter(self._entries.items()))
            if now - oldest.asked <= IN_USE_S:
                break
            used -= oldest.nbytes
            del self._entries[grammar]
        return used <= SHELF_BYTES

    def _begin(self, grammar: Grammar) -> Future[Compiled]:
        job = self._lanes.submit(self._compile, grammar)
        job.add_done_callback(lambda _: self._changed())
        return job

    def _compile(self, grammar: Grammar) -> Compiled:
        """On a lane."""
        size = len(grammar.source.encode())
        if size > MAX_GRAMMAR_BYTES:
            raise rejected(grammar, f"has {size} bytes; the most is {MAX_GRAMMAR_BYTES}")
        compiler = self._idle.get(block=False)
        try:
            compiled = compiler.compile(grammar)
        finally:
            self._idle.put(compiler)
        if compiled.nbytes > COMPILED_BYTES:
            mb = COMPILED_BYTES >> 20
            raise rejected(grammar, f"takes more than {mb} MiB when compiled; simplify it")
        return compiled


def _judge(entry: _Entry, now: float) -> GrammarState:
    if entry.condemned is not None:
        return GrammarState(error=entry.condemned)
    if entry.compiled is None or not entry.compiled.done():
        return PENDING if now - entry.since <= WAIT_S else GrammarState(error=_too_late())
    broken = entry.compiled.exception()
    if broken is None:
        return READY
    if isinstance(broken, TriremeError):
        return GrammarState(error=broken)
    why = f"the grammar compiler failed: {broken!r}; see the worker's log"
    return GrammarState(error=InternalError(why, stage=Stage.QUEUE))


def _too_late() -> DeadlineExceeded:
    return DeadlineExceeded(
        f"the grammar was not compiled within {WAIT_S:g} s, others were ahead of it; try again",
        stage=Stage.QUEUE,
    )


def _nobody() -> None:
    """Until `bind`, nobody waits for changes."""
