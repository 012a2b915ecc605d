"""The expert counts that a prefill reports are those of a plain pass over its prompt, however it
was chunked and batched, whatever came from the prefix cache, whoever computed that."""

from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.ids import AttemptKey, BlockId, RequestId, WorkerId
from core.messages import Attach, Prefill, PrefillDone, Reserve, StepEvents
from core.ports import ReadyBlocks, StepOutput
from core.sampling import Sampling
from engine.device.backend import TorchBackend
from engine.device.experts import ExpertLog, context_counts
from engine.device.pool import KVPool
from engine.device.runner import Runner, kv_layout
from engine.model.attention import StepContext
from engine.model.decoder import Decoder
from engine.policy.scheduler import Scheduler
from tests.property.paged_model import config
from tests.unit.expert_help import MOE, VOCAB, moe_decoder, plain_counts

BLOCK = 4
MODEL = moe_decoder()
SHARED = tuple((7 * i + 3) % VOCAB for i in range(24))


@dataclass(frozen=True)
class Ask:
    """`shared` tokens that others begin with too, then `own`; decoded by the other worker, or
    by the one that prefilled."""

    shared: int
    own: tuple[int, ...]
    output: int
    hand_over: bool

    @property
    def prompt(self) -> tuple[int, ...]:
        return SHARED[: self.shared] + self.own


ASKS = st.builds(
    Ask,
    shared=st.integers(0, len(SHARED)),
    own=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=7).map(tuple),
    output=st.integers(2, 9),
    hand_over=st.booleans(),
)


class Worker:
    """Scheduler and runner over a pool whose counters are garbage at first."""

    def __init__(
        self, name: str, model: Decoder, blocks: int, chunk: int, policy: str = "sarathi"
    ) -> None:
        self.layout = kv_layout(model.config, BLOCK, "float32")
        self.memory = memoryview(bytearray(blocks * self.layout.block_bytes))
        self.pool = KVPool(self.layout, blocks, self.memory)
        self.pool.expert_counts.fill_(-9)
        self.runner = Runner(model, self.pool, TorchBackend.of(torch.float32))
        self.scheduler = Scheduler(
            config(
                worker_id=WorkerId(name),
                total_blocks=blocks,
                chunk_tokens=chunk,
                policy=policy,
                layers=model.config.layers,
                max_running=8,
                max_queued_tokens=10_000,
                max_model_len=(blocks - 1) * BLOCK,
                vocab_size=VOCAB,
                eos_ids=frozenset(),
            ),
            [0] * blocks,
        )
        self.done: dict[AttemptKey, PrefillDone] = {}
        self.tokens: dict[AttemptKey, list[int]] = {}
        self.ready: list[ReadyBlocks] = []

    def step(self) -> None:
        plan = self.scheduler.plan(0.0)
        self._hear(self.scheduler.commit(plan, self.runner.run(plan), 0.0))

    def _hear(self, output: StepOutput) -> None:
        for _, event in output.events:
            if isinstance(event, PrefillDone):
                self.done[event.key] = event
            elif isinstance(event, StepEvents):
                for tokens in event.events:
                    self.tokens.setdefault(tokens.key, []).extend(tokens.token_ids)
        self.ready.extend(output.ready)

    def block(self, block_id: BlockId) -> memoryview:
        size = self.layout.block_bytes
        return self.memory[block_id * size : (block_id + 1) * size]


def key(number: int) -> AttemptKey:
    return AttemptKey(RequestId(f"r{number}"), 1)


def move(ready: ReadyBlocks, source: Worker, target: Worker) -> None:
    """What the movers do: the bytes of whole blocks."""
    lease, count = ready.grant, len(ready.block_ids)
    if count:
        landing = target.scheduler.landing_begin(
            lease.lease_id, lease.epoch, ready.first_index, count, 0.0
        )
        for block, at in zip(ready.block_ids, landing, strict=True):
            target.block(at)[:] = source.block(block)
        target.scheduler.landing_end(lease.lease_id, ready.first_index, count, True, 0.0)
    source.scheduler.moved(ready.key, ready.block_ids, ready.last)


def serve(asks: list[Ask], p: Worker, d: Worker, first: int = 0) -> None:
    """Prefill all of them on p, decode there or on d, to the end."""
    samplings = [Sampling(max_tokens=ask.output, ignore_eos=True) for ask in asks]
    for i, (ask, sampling) in enumerate(zip(asks, samplings, strict=True), first):
        grant = (
            d.scheduler.reserve(Reserve(key(i), ask.prompt), "o", 0.0) if ask.hand_over else None
        )
        p.scheduler.prefill(Prefill(key(i), ask.prompt, sampling, grant=grant), "o", 0.0)
    for _ in range(500):
        p.step()
        d.step()
        ready, p.ready = p.ready, []
        for blocks in ready:
            move(blocks, p, d)
            if blocks.last:
                number = int(blocks.key.request_id[1:]) - first
                attach(blocks, samplings[number], p, d)
        if all(len(outputs(i, p, d)) == ask.output for i, ask in enumerate(asks, first)):
            return
    raise AssertionError("not served within 500 steps")


def attach(ready: ReadyBlocks, sampling: Sampling, p: Worker, d: Worker) -> None:
    """What router and hand-over make of the last blocks: PrefillDone, then Attach."""
    assert ready.first is not None
    done = PrefillDone(ready.key, ready.first, 0, ready.expert_counts)
    p.done[ready.key] = done
    token, lease = ready.first.token_ids[0], ready.grant
    d.scheduler.attach(Attach(ready.key, lease.lease_id, lease.epoch, token, 1, sampling), "o", 0.0)


def outputs(number: int, *workers: Worker) -> list[int]:
    return [token for w in dict.fromkeys(workers) for token in w.tokens.get(key(number), [])]


def check(asks: list[Ask], p: Worker, d: Worker) -> None:
    """Counts of the prompts, then of prompts that go on from what either worker has cached."""
    serve(asks, p, d)
    for i, ask in enumerate(asks):
        assert p.done[key(i)].expert_counts == plain_counts(MODEL, ask.prompt)
    whole = [ask.prompt + tuple(outputs(i, p, d)) for i, ask in enumerate(asks)]
    again = [Ask(0, tokens, 1, False) for tokens in whole]
    for worker, first in ((p, 100), (d, 200)):
        serve(again, worker, worker, first)
        for i, tokens in enumerate(whole, first):
            assert worker.done[key(i)].expert_counts == plain_counts(MODEL, tokens)


@settings(max_examples=20, deadline=None)
@given(
    asks=st.lists(ASKS, min_size=1, max_size=4),
    chunk=st.integers(1, 40),
    policy=st.sampled_from(["sarathi", "layered"]),
)
def test_counts_are_those_of_a_plain_pass(asks: list[Ask], chunk: int, policy: str) -> None:
    check(asks, Worker("p", MODEL, 64, chunk, policy), Worker("d", MODEL, 64, 16))


def test_counts_survive_preemption_and_come_from_cached_and_moved_blocks() -> None:
    """The same with so little memory that sequences are computed twice."""
    asks = [Ask(9, (i,), 20, hand_over=i > 2) for i in range(5)]
    p, d = Worker("p", MODEL, 14, 7), Worker("d", MODEL, 40, 16)
    check(asks, p, d)
    totals = [{c.name: c.value for c in w.scheduler.report(0.0).counters} for w in (p, d)]
    assert totals[0]["preemptions"] > 0
    assert p.scheduler.report(0.0).cached_tokens_total > 0
    assert d.scheduler.report(0.0).cached_tokens_total > 0


def test_a_dense_model_has_no_counters_and_reports_none() -> None:
    dense = moe_decoder(moe=None)
    p, d = Worker("p", dense, 32, 8), Worker("d", dense, 32, 8)
    serve([Ask(9, (1,), 3, True), Ask(9, (2,), 3, False)], p, d)
    assert p.pool.expert_counts.shape == (32, 0)
    assert [p.done[key(i)].expert_counts for i in range(2)] == [(), ()]


def test_only_the_layers_that_ran_are_counted() -> None:
    """A prompt may pass the layers in several steps."""
    counts = torch.full((3, 2 * MOE.experts), -9, dtype=torch.int16)
    context = StepContext((), torch.tensor([2, 2, 2, 0]), torch.tensor([1, 2, 3, 0]))
    counts[2] = 1
    chosen = [torch.tensor([[0, 1], [1, 2], [0, 4], [3, 4]]), torch.tensor([[4, 3]] * 4)]
    for first, each in enumerate(chosen):
        log = ExpertLog()
        log(each)
        log.store(counts, context, MOE.experts, first)
    assert context_counts(counts, [BlockId(0)]) == (0, 0, 0, 1, 1, 0, 0, 0, 1, 1)
    assert context_counts(counts, [BlockId(2)]) == (3, 3, 2, 1, 2, 1, 1, 1, 4, 4)
    assert torch.all(counts[1] == -9)
