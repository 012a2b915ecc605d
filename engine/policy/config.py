"""What a scheduler is told once, at start."""

from dataclasses import dataclass

from core.ids import Epoch, WorkerId
from core.messages import Role
from core.prefix import PrefixScope


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Sizes in blocks and tokens, durations in seconds.

    chunk_tokens: tokens computed in one step; decodes count too, but never push prefill out.
    max_running: sequences that decode here, leases that will become such included.
    policy: a name in `engine.policy.policies.choose`.  layers: of the model.
    lease_s: an attempt that nobody renews for this long is dropped.
    """

    role: Role
    worker_id: WorkerId
    epoch: Epoch
    address: str
    total_blocks: int
    block_size: int
    chunk_tokens: int
    policy: str
    layers: int
    max_running: int
    max_queued_tokens: int
    max_model_len: int
    vocab_size: int
    eos_ids: frozenset[int]
    lease_s: float
    model_digest: str
    kv_variant: str

    @property
    def max_len(self) -> int:
        """Longest prompt plus output that fits model and pool, one block of headroom left."""
        return min(self.max_model_len, (self.total_blocks - 1) * self.block_size)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold the KV of `tokens` tokens."""
        return -(-tokens // self.block_size)

    def scope(self, salt: str) -> PrefixScope:
        """What besides the tokens determines the KV of a request with this cache salt."""
        return PrefixScope(self.model_digest, self.kv_variant, salt=salt)
