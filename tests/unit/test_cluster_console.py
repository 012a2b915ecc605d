"""What the user sees and presses while a cluster starts."""

import io
import signal
import time

import pytest
from rich.console import Console

from cluster.console import Steps
from cluster.interrupts import DOUBLE_S, Interrupts


@pytest.fixture
def handlers():
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    Interrupts.install()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_both_signals_interrupt_and_a_double_delivery_is_one(handlers):
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)

    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)

    time.sleep(DOUBLE_S)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_without_a_terminal_each_step_is_one_line_when_it_ends():
    out = io.StringIO()
    with Steps(Console(file=out, width=80)) as steps:
        steps.show("ray", "starting")
        steps.show("serve", "[bold] is no markup here")
        steps.done("ray", "up")
        steps.done("ray", "told again")
        steps.done("serve", "[bold] is no markup here")

    ray, serve = out.getvalue().splitlines()
    assert ray.split() == ["ray", "0.0", "s", "up"]
    assert "[bold] is no markup here" in serve


def test_a_failed_step_is_not_shown_as_done():
    out = io.StringIO()
    with (
        pytest.raises(ValueError, match="broken"),
        Steps(Console(file=out)) as steps,
        steps.step("ray", "starting"),
    ):
        raise ValueError("broken")

    assert out.getvalue() == ""
