"""A model small enough to predict, over KV memory that can be spoilt like the real one.

The KV cell of a position depends on every cell before it and on the token; the next token depends
on the last cell.  So one stale, foreign or missing cell anywhere in a block table changes the
output, and comparing tokens with `plain_loop` checks every block that was ever read.
"""

from collections.abc import Sequence
from dataclasses import replace

from core.ids import AttemptKey, BlockId, Epoch, RequestId, WorkerId
from core.messages import FinishReason, Role
from core.sampling import Sampling
from engine.policy.config import SchedulerConfig
from engine.policy.plan import Plan, Sampled, Work

VOCABULARY = 997
UNWRITTEN = -1
HALF_WRITTEN = -2

CONFIG = SchedulerConfig(
    role=Role.HYBRID,
    worker_id=WorkerId("w"),
    epoch=Epoch(7),
    address="127.0.0.1:1",
    total_blocks=12,
    block_size=4,
    chunk_tokens=6,
    policy="sarathi",
    layers=3,
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
    """Memory of one worker, and the runner over it.

    As in the real one, what tokens between two layers have become is kept to the next step only;
    their cells are of no use to anybody before the last layer.
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        self._size = block_size
        self._memory = [[UNWRITTEN] * block_size for _ in range(blocks)]
        self._partial: dict[AttemptKey, Work] = {}

    def read(self, block: BlockId) -> list[int]:
        return list(self._memory[block])

    def write(self, block: BlockId, cells: list[int]) -> None:
        self._memory[block] = list(cells)

    def run(self, plan: Plan) -> list[Sampled | None]:
        outcome = [self._work(work) for work in plan.works]
        self._partial = {work.key: work for work in plan.works if not work.is_complete}
        return outcome

    def _work(self, work: Work) -> Sampled | None:
        assert len(work.block_ids) == -(-(work.start + len(work.token_ids)) // self._size)
        if work.layers is not None and work.layers.start:
            before = self._partial[work.key]
            assert before.layers is not None
            assert before.layers.stop == work.layers.start
            assert (before.start, before.token_ids) == (work.start, work.token_ids)
        cells = [self._memory[block][i] for block, i in self._places(work, range(work.start))]
        for token in work.token_ids:
            cells.append(_cell(cells, token) if work.is_complete else HALF_WRITTEN)
        written = range(work.start, len(cells))
        for (block, i), cell in zip(self._places(work, written), cells[work.start :], strict=True):
            self._memory[block][i] = cell
        return Sampled(cells[-1] % VOCABULARY) if work.sample else None

    def _places(self, work: Work, positions: range) -> list[tuple[BlockId, int]]:
        return [(work.block_ids[p // self._size], p % self._size) for p in positions]
