"""Two workers and a router's worth of accidents: prefill on P, hand-over, decode on D, or both on
one; cancels, expiry, lost sessions, failed and late writes, failed steps, at any moment.

Output is compared with the plain loop at every token, so a block that is reused too early, shared
wrongly or left unwritten shows as a wrong token (see `paged_model`).
"""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from core.errors import InternalError, LeaseGone, Refused
from core.ids import AttemptKey, BlockId, WorkerId
from core.messages import (
    Attach,
    AttemptFailed,
    Event,
    Fault,
    FinishReason,
    Grant,
    Prefill,
    PrefillDone,
    Reserve,
    StepEvents,
    TokenEvent,
)
from core.ports import ReadyBlocks, StepOutput
from core.sampling import Sampling
from engine.policy.config import SchedulerConfig
from engine.policy.plan import Plan, Work
from engine.policy.policies.choose import POLICIES
from engine.policy.scheduler import Scheduler
from tests.property.paged_model import PagedModel, config, key, plain_loop

GARBAGE = -7
FAMILIES = [[11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22], [31, 32, 33, 34, 35, 36]]


class Worker:
    def __init__(self, settings: SchedulerConfig) -> None:
        self.config = settings
        self.generations = [0] * settings.total_blocks
        self.scheduler = Scheduler(settings, self.generations)
        self.model = PagedModel(settings.total_blocks, settings.block_size)
        self.plan: Plan | None = None
        self.ready: list[ReadyBlocks] = []


@dataclass
class Write:
    """Bytes on their way from a worker's lent blocks into the blocks of a lease."""

    ready: ReadyBlocks
    target: tuple[BlockId, ...]


@dataclass
class Attempt:
    """What the router knows.  `expected` is the plain loop's output from token `emitted` on."""

    owner: str
    sampling: Sampling
    emitted: int
    expected: list[int]
    finish: FinishReason
    on: list[Worker]
    grant: Grant | None = None
    tokens: list[int] = field(default_factory=list)
    prefill_done: int = 0
    landed: bool = False
    over: bool = False


class TwoWorkers(RuleBasedStateMachine):
    policy = "sarathi"

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        rules = config(policy=self.policy, layers=6, max_model_len=28)
        self.p = Worker(replace(rules, worker_id=WorkerId("p")))
        self.d = Worker(replace(rules, worker_id=WorkerId("d"), total_blocks=8))
        self.attempts: dict[AttemptKey, Attempt] = {}
        self.writes: list[Write] = []

    # -------------------------------------------------------------------------- the router

    @rule(
        family=st.sampled_from(FAMILIES),
        shared=st.integers(1, 12),
        own=st.lists(st.integers(50, 52), max_size=8),
        where=st.sampled_from(["p", "d", "p to d", "p to d"]),
        owner=st.sampled_from(["a", "b"]),
        salt=st.sampled_from(["", "", "tenant"]),
        max_tokens=st.integers(1, 20),
        emitted=st.integers(0, 3),
    )
    def submit(
        self,
        family: list[int],
        shared: int,
        own: list[int],
        where: str,
        owner: str,
        salt: str,
        max_tokens: int,
        emitted: int,
    ) -> None:
        prompt = [*family[:shared], *own]
        sampling = Sampling(max_tokens=max_tokens, ignore_eos=max_tokens > 10)
        output, finish = plain_loop(prompt, sampling, self.d.config)
        emitted = min(emitted, len(output) - 1)
        tokens = (*prompt, *output[:emitted])
        name = key(f"r{len(self.attempts)}")
        attempt = Attempt(owner, sampling, emitted, output[emitted:], finish, [self.p])
        try:
            if where == "p to d":
                attempt.grant = self.d.scheduler.reserve(
                    Reserve(name, tokens, salt), owner, self.now
                )
                attempt.on = [self.p, self.d]
            elif where == "d":
                attempt.on = [self.d]
            attempt.on[0].scheduler.prefill(
                Prefill(name, tokens, sampling, emitted, salt, attempt.grant), owner, self.now
            )
        except Refused:
            for worker in attempt.on:
                worker.scheduler.cancel(name)
            attempt.over = True
        self.attempts[name] = attempt

    def live(self) -> list[AttemptKey]:
        return [k for k, a in self.attempts.items() if not a.over]

    def drop(self, name: AttemptKey) -> None:
        self.attempts[name].over = True
        for worker in self.attempts[name].on:
            worker.scheduler.cancel(name)
            assert not worker.scheduler.holds(name)
            assert not worker.scheduler.cancel(name)

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.drop(data.draw(st.sampled_from(self.live())))

    @precondition(lambda self: len(self.live()) > 3)
    @rule(owner=st.sampled_from(["a", "b"]))
    def session_of_an_owner_ends(self, owner: str) -> None:
        for worker in (self.p, self.d):
            worker.scheduler.drop_owner(owner)
            assert worker.scheduler.drop_owner(owner) == 0
        for name in self.live():
            if self.attempts[name].owner == owner:
                self.drop(name)

    @precondition(lambda self: self.live())
    @rule(data=st.data(), seconds=st.sampled_from([4.0, 11.0]), p_first=st.booleans())
    def time_passes_and_one_is_forgotten(
        self, data: st.DataObject, seconds: float, p_first: bool
    ) -> None:
        self.now += seconds
        forgotten = data.draw(st.sampled_from(self.live()))
        self.renew([name for name in self.live() if name != forgotten])
        for worker in (self.p, self.d) if p_first else (self.d, self.p):
            self.hear(worker, worker.scheduler.expire(self.now))

    def renew(self, names: list[AttemptKey]) -> None:
        for worker in (self.p, self.d):
            for owner in ("a", "b"):
                mine = [n for n in names if self.attempts[n].owner == owner]
                worker.scheduler.renew(mine, owner, self.now)

    @precondition(lambda self: any(self.attempts[n].landed for n in self.live()))
    @rule(data=st.data())
    def attach(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([n for n in self.live() if self.attempts[n].landed]))
        self.attach_now(name)

    def attach_now(self, name: AttemptKey) -> None:
        attempt = self.attempts[name]
        attempt.landed = False
        assert attempt.grant is not None
        ask = Attach(
            key=name,
            lease_id=attempt.grant.lease_id,
            epoch=attempt.grant.epoch,
            token=attempt.tokens[0],
            emitted=attempt.emitted + 1,
            sampling=attempt.sampling,
        )
        self.d.scheduler.attach(ask, attempt.owner, self.now)
        with pytest.raises(LeaseGone):
            self.d.scheduler.attach(ask, attempt.owner, self.now)

    # --------------------------------------------------------------------------- the engines

    @rule(at=st.sampled_from(["p", "d"]))
    def step_begins(self, at: str) -> None:
        worker: Worker = getattr(self, at)
        if worker.plan is not None:
            with pytest.raises(InternalError):
                worker.scheduler.plan(self.now)
            return
        plan = worker.scheduler.plan(self.now)
        self.check_size(plan, worker.config)
        assert len({w.key for w in plan.works}) == len(plan.works)
        assert all(not self.attempts[w.key].over for w in plan.works)
        worker.plan = plan if plan.works else None

    def check_size(self, plan: Plan, rules: SchedulerConfig) -> None:
        """In tokens times layers; what a policy may exceed its budget by is its own affair."""
        decodes = [w for w in plan.works if w.sample and w.sample.index and len(w.token_ids) == 1]
        cost = sum(len(w.token_ids) * depth(w, rules) for w in plan.works)
        beyond = {"prefill_first": rules.max_model_len, "layered": len(decodes) + 1}
        most = max(rules.chunk_tokens, len(decodes) + 1) + beyond.get(self.policy, 0)
        assert cost <= most * rules.layers

    @precondition(lambda self: self.p.plan or self.d.plan)
    @rule(data=st.data())
    def step_ends(self, data: st.DataObject) -> None:
        self.finish_step(data.draw(st.sampled_from([w for w in (self.p, self.d) if w.plan])))

    def finish_step(self, worker: Worker) -> None:
        """Memory is touched only now, the worst moment: anything may have happened since."""
        assert worker.plan is not None
        sampled = worker.model.run(worker.plan)
        plan, worker.plan = worker.plan, None
        self.hear(worker, worker.scheduler.commit(plan, sampled, self.now))

    @precondition(lambda self: self.p.plan or self.d.plan)
    @rule(data=st.data())
    def step_fails(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from([w for w in (self.p, self.d) if w.plan]))
        assert worker.plan is not None
        plan, worker.plan = worker.plan, None
        hit = {w.key for w in plan.works if not self.attempts[w.key].over}
        output = worker.scheduler.abandon(plan, Fault("internal_error", "no luck"), self.now)
        assert {event.key for _, event in output.events} == hit
        self.hear(worker, output)

    def hear(self, worker: Worker, output: StepOutput) -> None:
        tellers = [owner for owner, event in output.events if isinstance(event, StepEvents)]
        assert len(tellers) == len(set(tellers)), "one message per owner and step"
        for owner, event in output.events:
            self.hear_event(owner, event)
        for ready in output.ready:
            assert not self.attempts[ready.key].over
            assert ready.block_ids or ready.last
            assert ready.generations == tuple(worker.generations[b] for b in ready.block_ids)
            worker.ready.append(ready)

    def hear_event(self, owner: str, event: Event) -> None:
        if isinstance(event, StepEvents):
            for token in event.events:
                self.hear_token(owner, token)
        elif isinstance(event, PrefillDone):
            attempt = self.attempts[event.key]
            attempt.prefill_done += 1
            assert attempt.prefill_done == 1
            assert event.first.token_ids == (attempt.expected[0],)
            assert attempt.grant is None or event.first.finish
        else:
            assert isinstance(event, AttemptFailed)
            assert owner == self.attempts[event.key].owner
            assert not self.attempts[event.key].over, "no event after the end"
            self.drop(event.key)

    def hear_token(self, owner: str, event: TokenEvent) -> None:
        attempt = self.attempts[event.key]
        assert owner == attempt.owner
        assert not attempt.over, "no event after the end"
        assert event.index == attempt.emitted + len(attempt.tokens), "tokens are contiguous"
        attempt.tokens.extend(event.token_ids)
        assert attempt.tokens == attempt.expected[: len(attempt.tokens)]
        ends = len(attempt.tokens) == len(attempt.expected)
        assert event.finish == (attempt.finish if ends else None)
        if ends:
            attempt.over = True
            if attempt.grant and len(attempt.tokens) == 1:
                self.d.scheduler.cancel(event.key)

    # ---------------------------------------------------------------------------- the movers

    @precondition(lambda self: self.p.ready)
    @rule()
    def write_begins(self) -> None:
        ready = self.p.ready.pop(0)
        grant = ready.grant
        count = len(ready.block_ids)
        if not count:
            self.over_there(ready, ok=True)
            return
        try:
            target = self.d.scheduler.landing_begin(
                grant.lease_id, grant.epoch, ready.first_index, count, self.now
            )
        except LeaseGone:
            self.over_there(ready, ok=False)
            return
        assert not self.attempts[ready.key].over
        self.writes.append(Write(ready, target))

    @precondition(lambda self: self.writes)
    @rule(data=st.data(), ok=st.booleans())
    def write_ends(self, data: st.DataObject, ok: bool) -> None:
        at = data.draw(st.integers(0, len(self.writes) - 1))
        mine = [w.ready.key for w in self.writes]
        self.end_write(self.writes.pop(mine.index(mine[at])), ok)

    def end_write(self, write: Write, ok: bool) -> None:
        """Bytes land at the last moment, whatever became of lease and sender meanwhile."""
        for source, target in zip(write.ready.block_ids, write.target, strict=True):
            cells = self.p.model.read(source) if ok else [GARBAGE] * self.d.config.block_size
            self.d.model.write(target, cells)
        ready = write.ready
        generations = tuple(self.p.generations[b] for b in ready.block_ids)
        assert generations == ready.generations, "a lent block keeps its content"
        self.d.scheduler.landing_end(
            ready.grant.lease_id, ready.first_index, len(ready.block_ids), ok, self.now
        )
        self.over_there(ready, ok)

    def over_there(self, ready: ReadyBlocks, ok: bool) -> None:
        """The mover's terminal report; what a worker does with it."""
        name = ready.key
        attempt = self.attempts[name]
        self.p.scheduler.moved(name, ready.block_ids, ready.last and ok)
        if attempt.over:
            return
        if not ok:
            self.p.scheduler.cancel(name)
            assert attempt.grant is not None
            held = self.d.scheduler.holds(name)
            assert self.d.scheduler.abort_lease(name, attempt.grant.lease_id) == held
            assert not self.d.scheduler.holds(name)
            self.drop(name)
        elif ready.last:
            attempt.landed = True

    @rule(rounds=st.integers(1, 6))
    def all_goes_well_for_a_while(self, rounds: int) -> None:
        for _ in range(rounds):
            self.round()

    def round(self) -> None:
        """One step of each worker, one transfer, every possible attach."""
        for at in ("p", "d"):
            worker: Worker = getattr(self, at)
            if worker.plan is None:
                self.step_begins(at)
            if worker.plan is not None:
                self.finish_step(worker)
        if self.writes:
            self.end_write(self.writes.pop(0), ok=True)
        if self.p.ready:
            self.write_begins()
        for name in [n for n in self.live() if self.attempts[n].landed]:
            self.attach_now(name)

    # ---------------------------------------------------------------------------- invariants

    @invariant()
    def bookkeeping_is_intact(self) -> None:
        for worker in (self.p, self.d):
            worker.scheduler.check_integrity()

    @invariant()
    def live_attempts_are_held_somewhere(self) -> None:
        for name in self.live():
            attempt = self.attempts[name]
            assert any(w.scheduler.holds(name) for w in attempt.on)

    def teardown(self) -> None:
        """Left alone, everything that is live finishes, and every block comes home."""
        for _ in range(1500):
            if not (self.live() or self.writes or self.p.ready or self.p.plan or self.d.plan):
                break
            self.renew(self.live())
            self.round()
        assert not self.live(), "somebody waits for ever"
        for worker in (self.p, self.d):
            worker.scheduler.check_integrity()
            report = worker.scheduler.report(self.now)
            assert report.free_blocks == report.total_blocks
            assert report.waiting + report.running + report.held == 0
            assert report.leased_blocks + report.lent_blocks + report.quarantined_blocks == 0


def depth(work: Work, rules: SchedulerConfig) -> int:
    return rules.layers if work.layers is None else work.layers.stop - work.layers.start


@pytest.mark.parametrize("policy", POLICIES)
def test_two_workers(policy: str) -> None:
    machine = type("Machine", (TwoWorkers,), {"policy": policy})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=60, stateful_step_count=60, deadline=None)
    )
