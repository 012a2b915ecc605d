"""One worker with a predictable model, stepped by hand."""

from core.messages import Prefill, StepEvents, WorkerReport
from core.ports import StepOutput
from core.sampling import Sampling
from engine.policy.config import SchedulerConfig
from engine.policy.grammars import GrammarPort
from engine.policy.plan import Plan
from engine.policy.scheduler import Scheduler
from tests.property.paged_model import PagedModel, key

LONG = Sampling(max_tokens=100, ignore_eos=True)


class Bench:
    def __init__(self, settings: SchedulerConfig, grammars: GrammarPort | None = None) -> None:
        self.config = settings
        self.scheduler = Scheduler(settings, grammars=grammars)
        self.model = PagedModel(settings.total_blocks, settings.block_size)
        self.now = 0.0
        self.tokens: dict[str, list[int]] = {}

    def submit(
        self, name: str, prompt: list[int], sampling: Sampling = LONG, salt: str = ""
    ) -> None:
        job = Prefill(key(name), tuple(prompt), sampling, salt=salt)
        self.scheduler.prefill(job, "owner", self.now)

    def step(self) -> tuple[Plan, StepOutput]:
        plan = self.scheduler.plan(self.now)
        self.now += 0.5
        output = self.scheduler.commit(plan, self.model.run(plan), self.now)
        for _, event in output.events:
            for token in event.events if isinstance(event, StepEvents) else ():
                self.tokens.setdefault(token.key.request_id, []).extend(token.token_ids)
        self.scheduler.check_integrity()
        return plan, output

    def until_idle(self) -> None:
        for _ in range(1000):
            if not self.step()[0].works:
                return
        raise AssertionError("still busy after 1000 steps")

    def report(self) -> WorkerReport:
        return self.scheduler.report(self.now)

    def count(self, name: str) -> int:
        return {c.name: c.value for c in self.report().counters}[name]


def shape(plan: Plan) -> list[tuple[str, int, int]]:
    """(name, start, tokens) of each work."""
    return [(w.key.request_id, w.start, len(w.token_ids)) for w in plan.works]
