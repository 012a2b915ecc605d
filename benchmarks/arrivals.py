"""Requests that arrive by themselves, as values: the same for everybody who is compared."""

import csv
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path

LONG_SHARE = 0.2
CHAT, CHAT_OUT = (24, 160), (24, 64)
LONG, LONG_OUT = (600, 1400), (8, 24)


@dataclass(frozen=True, slots=True)
class Arrival:
    """at: seconds from the start of the run."""

    at: float
    prompt: tuple[int, ...]
    out: int


def mixed(seed: int, count: int, rate: float, vocab: int) -> list[Arrival]:
    """Poisson arrivals, `rate` a second: short chats, one in five a long document to read.

    The prompts have nothing in common: no prefix cache helps anybody.
    """
    source = random.Random(seed)
    at, arrivals = 0.0, []
    for _ in range(count):
        at += source.expovariate(rate)
        is_long = source.random() < LONG_SHARE
        prompt = source.randint(*(LONG if is_long else CHAT))
        out = source.randint(*(LONG_OUT if is_long else CHAT_OUT))
        arrivals.append(Arrival(at, _tokens(source, prompt, vocab), out))
    return arrivals


def from_trace(path: Path, count: int, rate: float, longest: int, vocab: int) -> list[Arrival]:
    """The first requests of a trace in the format of the Azure LLM inference traces (CSV of
    TIMESTAMP, ContextTokens, GeneratedTokens), brought to `rate` a second on average.

    Prompt plus output are cut to `longest` tokens.
    """
    rows = list(islice(_rows(path), count))
    began, ended = rows[0][0], rows[-1][0]
    pace = (len(rows) - 1) / rate / max(ended - began, 1e-9)
    source = random.Random(0)
    return [
        Arrival((at - began) * pace, _tokens(source, min(prompt, longest - out), vocab), out)
        for at, prompt, out in ((at, prompt, min(out, longest // 4)) for at, prompt, out in rows)
    ]


def _rows(path: Path) -> Iterator[tuple[float, int, int]]:
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            # Seven decimals are more than fromisoformat of Python 3.11 takes.
            at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            yield at, int(row["ContextTokens"]), int(row["GeneratedTokens"])


def _tokens(source: random.Random, count: int, vocab: int) -> tuple[int, ...]:
    return tuple(source.randrange(vocab) for _ in range(count))
