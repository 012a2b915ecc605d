"""What `trireme serve` shows while it starts: one line per step, with the time it took."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text


def _fixed() -> Column:
    """Never shortened: a narrow terminal costs the detail its end, not the time."""
    return Column(no_wrap=True, min_width=8)


class _Seconds(ProgressColumn):
    """How long the step has taken, or took."""

    def render(self, task: Task) -> Text:
        took = task.finished_time if task.finished else task.elapsed
        return Text(f"{took or 0.0:5.1f} s")


class Steps:
    """Live lines on a terminal; elsewhere a plain line as each step ends."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began: dict[str, float] = {}
        self._tasks: dict[str, TaskID] = {}
        self._ended: set[str] = set()
        self._live = Progress(
            SpinnerColumn(finished_text="[green]✓[/]"),
            TextColumn("{task.description:<12}", table_column=_fixed()),
            _Seconds(table_column=_fixed()),
            TextColumn(
                "{task.fields[detail]}",
                table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
            ),
            console=console,
            expand=True,
            disable=not console.is_terminal,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> "Steps":
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def show(self, name: str, detail: str) -> None:
        """The step began, or got further."""
        if name not in self._began:
            self._began[name] = time.monotonic()
            self._tasks[name] = self._live.add_task(name, total=1, detail="")
        self._live.update(self._tasks[name], detail=escape(detail))

    def done(self, name: str, detail: str = "") -> None:
        """The step ended well; only the first call counts."""
        if name in self._ended:
            return
        self.show(name, detail)
        self._ended.add(name)
        self._live.update(self._tasks[name], completed=1)
        if not self._console.is_terminal:
            took = time.monotonic() - self._began[name]
            self._console.print(f"{name:<12} {took:5.1f} s  {escape(detail)}", soft_wrap=True)

    @contextmanager
    def step(self, name: str, detail: str) -> Iterator[None]:
        """A step that is over when the block is; a failed one stays unfinished."""
        self.show(name, detail)
        yield
        self.done(name, detail)
