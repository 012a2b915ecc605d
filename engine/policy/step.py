"""What the next step computes: decodes and prompt chunks, put together as the policy says."""

from engine.policy.decode import DecodeScheduler
from engine.policy.holdings import Holdings
from engine.policy.plan import Work
from engine.policy.policies.choose import POLICIES
from engine.policy.prefill import PrefillScheduler


class StepPlanner:
    """Owner of the two schedulers and of the policy between them."""

    def __init__(self, held: Holdings) -> None:
        config = held.config
        policy = POLICIES[config.policy](config)
        self._held = held
        self._stalls = policy.stalls_decodes
        self._decodes = DecodeScheduler(held.roster, held.pool, config.block_size, held.totals)
        self._prefills = PrefillScheduler(held.roster, held.pool, policy, config, held.totals)

    def plan(self, now: float) -> list[Work]:
        """Decodes are planned first, whoever they preempt gets no chunk; a policy that stalls
        them has one kind of work in a step, so nobody is preempted after getting a chunk."""
        if self._stalls:
            return self._chunks(now) or self._decodes.plan()
        decodes = self._decodes.plan()
        return [*decodes, *self._chunks(now)]

    def _chunks(self, now: float) -> list[Work]:
        return self._prefills.plan(self._held.free_slots, now)
