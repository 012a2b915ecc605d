"""What a worker says no to, before it holds anything for it."""

from collections.abc import Sequence

from core.errors import BadRequest, Incompatible, Refused, Stage
from core.ids import AttemptKey
from core.messages import Attach, Prefill, Reserve
from core.sampling import Sampling
from core.states import SequenceState
from engine.policy.config import SchedulerConfig
from engine.policy.holdings import Holdings
from engine.policy.limits import objection

_RETRY_S = 0.1
"""About one engine step: the soonest that blocks, slots or queue space can have come free."""


class Admission:
    """Checks of the three calls that bring work.  Draining refuses the two that start some;
    a lease granted before may still be attached to."""

    def __init__(self, held: Holdings) -> None:
        self._held = held
        self.draining = False

    def check_reserve(self, ask: Reserve) -> None:
        """Raises Refused or BadRequest."""
        stage = Stage.RESERVE
        _check_context(self._held.config, ask.tokens, stage)
        self._check_open(ask.key, stage)
        local = sum(s.local for s in self._held.roster.in_state(SequenceState.WAITING))
        if self._held.free_slots <= local:
            raise self.refusal(stage, f"all {self._held.config.max_running} sequences are taken")

    def check_prefill(self, job: Prefill) -> None:
        """Raises Refused, BadRequest or Incompatible."""
        held, stage = self._held, Stage.PREFILL
        _check_context(held.config, job.tokens, stage)
        _check_sampling(held.config, job.sampling, stage)
        _check_position(held.config, job.emitted, job.sampling, len(job.tokens), stage)
        _check_grant(held.config, job)
        self._check_open(job.key, stage)
        queued, most = held.queued_tokens, held.config.max_queued_tokens
        if queued and queued + len(job.tokens) > most:
            raise self.refusal(
                stage, f"{queued} tokens are queued, {len(job.tokens)} more exceed {most}"
            )
        lent = held.lending.blocks
        if 2 * lent > held.pool.total:
            raise self.refusal(stage, f"{lent} of {held.pool.total} blocks wait to be moved")

    def check_attach(self, job: Attach) -> None:
        """Raises BadRequest."""
        config = self._held.config
        _check_vocabulary(config, (job.token,), Stage.ATTACH)
        if job.emitted < 1:
            raise _bad(config, Stage.ATTACH, "emitted", "an attach brings at least one token")
        _check_sampling(config, job.sampling, Stage.ATTACH)
        _check_position(config, job.emitted, job.sampling, config.max_len, Stage.ATTACH)

    def promised_blocks(self) -> int:
        """What waiting sequences will need: a newcomer gets only what they leave."""
        waiting = self._held.roster.in_state(SequenceState.WAITING)
        return sum(self._held.config.blocks_for(len(s.tokens)) for s in waiting)

    def refusal(self, stage: Stage, why: str) -> Refused:
        """Counts, and says to try elsewhere."""
        self._held.totals.refused += 1
        return Refused(
            f"{why}; try another worker",
            stage=stage,
            worker=self._held.config.worker_id,
            retry_after_s=_RETRY_S,
        )

    def _check_open(self, key: AttemptKey, stage: Stage) -> None:
        if self.draining:
            raise self.refusal(stage, "this worker is draining")
        if self._held.knows(key):
            raise self.refusal(stage, f"attempt {key} is here already")


def _check_context(config: SchedulerConfig, tokens: Sequence[int], stage: Stage) -> None:
    _check_vocabulary(config, tokens, stage)
    if not tokens:
        raise _bad(config, stage, "prompt", "the prompt is empty")
    if len(tokens) >= config.max_len:
        raise _bad(
            config,
            stage,
            "prompt",
            f"{len(tokens)} tokens and one to generate do not fit; prompt plus output may have "
            f"{config.max_len} tokens (model length {config.max_model_len}, KV pool of "
            f"{config.total_blocks} blocks of {config.block_size}); shorten the prompt",
        )


def _check_vocabulary(config: SchedulerConfig, tokens: Sequence[int], stage: Stage) -> None:
    """An id that the model does not know would take the whole step down with it."""
    if tokens and not 0 <= min(tokens) <= max(tokens) < config.vocab_size:
        raise _bad(
            config, stage, "prompt", f"token ids must be 0 to {config.vocab_size - 1}, not all are"
        )


def _check_sampling(config: SchedulerConfig, sampling: Sampling, stage: Stage) -> None:
    if (wrong := objection(sampling, config)) is not None:
        field, why = wrong
        raise _bad(config, stage, field, why)


def _check_position(
    config: SchedulerConfig, emitted: int, sampling: Sampling, longest: int, stage: Stage
) -> None:
    if not 0 <= emitted < longest:
        raise _bad(config, stage, "emitted", f"{emitted} is no position in {longest} tokens")
    if emitted >= sampling.max_tokens:
        raise _bad(
            config,
            stage,
            "max_tokens",
            f"output token number {emitted} is beyond max_tokens {sampling.max_tokens}",
        )


def _check_grant(config: SchedulerConfig, job: Prefill) -> None:
    if job.grant is None:
        return
    blocks = config.blocks_for(len(job.tokens))
    if job.grant.blocks != blocks or not 0 <= job.grant.present_blocks <= blocks:
        raise Incompatible(
            f"{job.grant.worker_id} granted {job.grant.blocks} blocks, {job.grant.present_blocks} "
            f"of them present, for what are {blocks} blocks here; start both with the same "
            "kv.block_size",
            stage=Stage.PREFILL,
            worker=config.worker_id,
            field="layout.block_size",
        )


def _bad(config: SchedulerConfig, stage: Stage, field: str, why: str) -> BadRequest:
    return BadRequest(why, stage=stage, worker=config.worker_id, field=field)
