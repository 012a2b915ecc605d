"""Compiling in a process of its own: what takes too long or too much memory is killed.

A grammar is a program written by a client: a few hundred characters can keep xgrammar busy for
hours and cost it gigabytes, and no call into it can be interrupted.
"""

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing import Pipe
from typing import TYPE_CHECKING

from core.errors import BadRequest, InternalError, Stage, TriremeError
from core.sampling import Grammar
from engine.grammar.matching import Compiled
from engine.grammar.rejection import rejected
from engine.grammar.vocabulary import Vocabulary
from engine.grammar.wire import FAILED, pack_grammar, pack_vocabulary

if TYPE_CHECKING:
    from engine.grammar.xgr import Toolkit

START_S = 60.0
COMPILE_S = 10.0
_END_S = 10.0
_FATE_S = 0.5
_START = "import sys; sys.path[:] = {path}; from engine.grammar.helper import main; main({fd})"
"""Imports what this process would import, whatever its working folder has."""


class Helper:
    """One helper process.  One thread asks; `kill` may come from any."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _START.format(path=sys.path, fd=theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def ask(self, body: bytes, limit_s: float) -> bytes:
        """Raises TimeoutError, or EOFError when it has ended."""
        try:
            self._connection.send_bytes(body)
            if self._connection.poll(limit_s):
                return self._connection.recv_bytes()
        except OSError as error:
            raise EOFError from error
        raise TimeoutError

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> str:
        """How it ended; by force if it has not."""
        try:
            status = self._process.wait(_FATE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            status = self._process.wait(_END_S)
        self._connection.close()
        return signal.Signals(-status).name if status < 0 else f"exit status {status}"


class IsolatedCompiler:
    """`engine.grammar.matching.Compiler`.  Starts its helper when there is work, and another one
    after a kill."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], compile_s: float = COMPILE_S) -> None:
        """vocabulary: called when there is work.  compile_s: how long one grammar may take."""
        self._vocabulary = vocabulary
        self._compile_s = compile_s
        self._running: tuple[Helper, Toolkit] | None = None
        self._process: Helper | None = None
        self._closed = False
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar) -> Compiled:
        """Raises BadRequest, ModelUnsupported (no tokenizer) or InternalError (no helper)."""
        self._running = self._running or self._start()
        helper, toolkit = self._running
        try:
            answer = helper.ask(pack_grammar(grammar), self._compile_s)
        except (TimeoutError, EOFError) as error:
            self._running = None
            raise self._failed(grammar, helper.end(), isinstance(error, TimeoutError)) from None
        status, body = answer[:1], answer[1:]
        if status == FAILED:
            raise BadRequest(body.decode(), stage=Stage.QUEUE, field="response_format")
        return toolkit.load(body)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()

    def _failed(self, grammar: Grammar, ended: str, late: bool) -> TriremeError:
        if late:
            why = f"takes more than {self._compile_s:g} s to compile; simplify it"
            return rejected(grammar, why)
        if ended == signal.SIGKILL.name:
            why = "the grammar compiler was killed from outside; try again"
            return InternalError(why, stage=Stage.QUEUE)
        return rejected(grammar, f"made its compiler crash ({ended}); simplify it")

    def _start(self) -> "tuple[Helper, Toolkit]":
        vocabulary = self._vocabulary()
        helper = self._spawn()
        with ExitStack() as otherwise:
            otherwise.callback(helper.end)
            toolkit = _toolkit(vocabulary)
            try:
                helper.ask(pack_vocabulary(vocabulary), START_S)
            except (TimeoutError, EOFError):
                raise InternalError(
                    f"the grammar compiler did not start within {START_S:g} s; see the worker's "
                    "log, and try again",
                    stage=Stage.QUEUE,
                ) from None
            otherwise.pop_all()
        return helper, toolkit

    def _spawn(self) -> Helper:
        with self._lock:
            if self._closed:
                raise InternalError("this worker is stopping", stage=Stage.QUEUE)
            self._process = Helper()
            return self._process


def _toolkit(vocabulary: Vocabulary) -> "Toolkit":
    """Imported only now, for it takes seconds: most workers never see a grammar."""
    try:
        from engine.grammar.xgr import Toolkit
    except ModuleNotFoundError as error:
        raise BadRequest(
            f"this cluster has no structured output: {error}; install xgrammar with its workers",
            stage=Stage.QUEUE,
            field="response_format",
        ) from error
    return Toolkit(vocabulary)
