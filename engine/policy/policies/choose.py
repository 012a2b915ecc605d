"""The policies by the names that `batch.policy` knows."""

from collections.abc import Callable, Mapping

from engine.policy.config import SchedulerConfig
from engine.policy.policies.layered import Layered
from engine.policy.policies.port import StepPolicy
from engine.policy.policies.prefill_first import PrefillFirst
from engine.policy.policies.prepack import Prepack
from engine.policy.policies.sarathi import Sarathi
from engine.policy.policies.splitfuse import SplitFuse

POLICIES: Mapping[str, Callable[[SchedulerConfig], StepPolicy]] = {
    "sarathi": lambda config: Sarathi(config.chunk_tokens),
    "splitfuse": lambda config: SplitFuse(config.chunk_tokens),
    "prefill_first": lambda config: PrefillFirst(config.chunk_tokens),
    "prepack": lambda config: Prepack(config.chunk_tokens),
    "layered": lambda config: Layered(config.chunk_tokens, config.layers),
}
