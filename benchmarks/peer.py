"""A peer engine in a child process that speaks lines of JSON (`peer_vllm.py`)."""

import json
import os
import selectors
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

START_S = 600.0
RUN_S = 300.0


class Peer:
    """Raises RuntimeError with the end of the child's log when it ends or stays silent."""

    def __init__(self, python: str, model: str, log: Path) -> None:
        self._log = log
        script = Path(__file__).with_name("peer_vllm.py")
        with log.open("wb") as sink:
            self._child = subprocess.Popen(
                [python, "-P", str(script), model],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                start_new_session=True,
                cwd=log.parent,
                env=os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2"},
            )
        try:
            self._answer(START_S)
        except RuntimeError:
            self._kill()
            raise

    def run(self, prompts: Sequence[list[int]], out: int) -> tuple[float, int]:
        """(seconds, tokens generated), all prompts at once."""
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps({"prompts": prompts, "out": out}).encode() + b"\n")
        self._child.stdin.flush()
        answer = self._answer(RUN_S)
        return answer["wall"], answer["tokens"]

    def stop(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(30)
        except subprocess.TimeoutExpired:
            self._kill()

    def _kill(self) -> None:
        """With its own children, which share its session."""
        os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait(30)

    def _answer(self, timeout_s: float) -> Any:
        assert self._child.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._child.stdout, selectors.EVENT_READ)
            ready = selector.select(timeout_s)
        line = self._child.stdout.readline() if ready else b""
        if not line:
            why = "ended" if ready else f"was silent for {timeout_s:.0f} s"
            raise RuntimeError(f"the peer {why}:\n{self._log.read_text(errors='replace')[-2000:]}")
        return json.loads(line)
