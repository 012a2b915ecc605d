"""A model small enough to predict, over KV memory that can be spoilt like the real one.

The KV cell of a position depends on every cell before it and on the token; the next token depends
on the last cell.  So one stale, foreign or missing cell anywhere in a block table changes the
output, and comparing tokens with `plain_loop` checks every block that was ever read.
"""

from collections.abc import Sequence
from dataclasses import replace

from core.ids import AttemptKey, BlockId, Epoch, RequestId, WorkerId
from core.messages import FinishReason, Role, Sampling
from engine.policy.config import SchedulerConfig
from engine.policy.plan import Plan

VOCABULARY = 997
UNWRITTEN = -1

CONFIG = SchedulerConfig(
    role=Role.HYBRID,
    worker_id=WorkerId("w"),
    epoch=Epoch(7),
    address="127.0.0.1:1",
    total_blocks=12,
    block_size=4,
    chunk_tokens=6,
    max_running=3,
    max_queued_tokens=60,
    max_model_len=40,
    vocab_size=VOCABULARY,
    eos_ids=frozenset(range(40)),
    lease_s=10.0,
    model_digest="m",
    kv_variant="v",
)


def config(**changes: object) -> SchedulerConfig:
    return replace(CONFIG, **changes)  # type: ignore[arg-type]


def key(name: str, attempt: int = 1) -> AttemptKey:
    return AttemptKey(RequestId(name), attempt)


def _cell(before: Sequence[int], token: int) -> int:
    return hash((tuple(before), token))


def plain_loop(
    prompt: Sequence[int], sampling: Sampling, rules: SchedulerConfig = CONFIG
) -> tuple[list[int], FinishReason]:
    """The whole output and why it ended, from one loop without blocks, batches or workers."""
    cells: list[int] = []
    for token in prompt:
        cells.append(_cell(cells, token))
    output: list[int] = []
    while True:
        token = cells[-1] % VOCABULARY
        output.append(token)
        eos = token in rules.eos_ids and not sampling.ignore_eos
        if eos or token in sampling.stop_token_ids:
            return output, FinishReason.STOP
        if len(output) >= sampling.max_tokens or len(prompt) + len(output) >= rules.max_len:
            return output, FinishReason.LENGTH
        cells.append(_cell(cells, token))


class PagedModel:
    """Memory of one worker, and the runner over it."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self._size = block_size
        self._memory = [[UNWRITTEN] * block_size for _ in range(blocks)]

    def read(self, block: BlockId) -> list[int]:
        return list(self._memory[block])

    def write(self, block: BlockId, cells: list[int]) -> None:
        self._memory[block] = list(cells)

    def run(self, plan: Plan) -> list[int | None]:
        return [self._work(w.block_ids, w.start, w.token_ids, bool(w.sample)) for w in plan.works]

    def _work(
        self, table: tuple[BlockId, ...], start: int, tokens: tuple[int, ...], sample: bool
    ) -> int | None:
        assert len(table) == -(-(start + len(tokens)) // self._size)
        cells = [self._memory[table[p // self._size]][p % self._size] for p in range(start)]
        for token in tokens:
            cells.append(_cell(cells, token))
            at = len(cells) - 1
            self._memory[table[at // self._size]][at % self._size] = cells[-1]
        return cells[-1] % VOCABULARY if sample else None
