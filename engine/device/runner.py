"""Executes plans: the model, its KV pool and the sampler put together.  Engine thread only."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from core.errors import InternalError, Stage
from core.ids import AttemptKey, BlockId, RequestId
from core.kvlayout import KVLayout
from core.sampling import Sampling
from engine.device.backend import Backend
from engine.device.batch import Batch, build_batch
from engine.device.experts import context_counts
from engine.device.forward import Forward
from engine.device.pool import KVPool
from engine.device.sampler import GrammarMasks, Sampler
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.policy.plan import Plan, SampleAt, Sampled, Work


class Runner:
    """`engine.loop.StepRunner` over one model and one pool."""

    def __init__(
        self,
        model: Decoder,
        pool: KVPool,
        backend: Backend,
        grammar: GrammarMasks | None = None,
        forward: Callable[[Plan, Batch], Tensor] | None = None,
    ) -> None:
        """backend: the one the model was built with.  grammar: None serves no grammars.
        forward: None for a `Forward` over the other three.

        Raises InternalError when the pool is laid out for another model.
        """
        fitting = kv_layout(model.config, pool.layout.block_size, pool.layout.dtype)
        if pool.layout != fitting:
            raise InternalError(
                f"model {model.config.name} does not fit a KV pool laid out as"
                f" {pool.layout}; make the layout with kv_layout",
                stage=Stage.START,
            )
        self._model = model
        self._pool = pool
        self._backend = backend
        self._forward = forward or Forward(model, pool, backend)
        self._sampler = Sampler(model.config.eos_ids, grammar)

    def run(self, plan: Plan) -> list[Sampled | None]:
        """Write the K/V of all works; what was sampled for each work, None where none is asked.

        Raises InternalError for a plan that no scheduler should make.
        """
        outcome: list[Sampled | None] = [None] * len(plan.works)
        if not plan.works:
            return outcome
        with torch.inference_mode():
            batch = build_batch(plan, self._pool.layout, self._backend.device)
            hidden = self._forward(plan, batch)
            if batch.asks:
                logits = self._model.logits(hidden[batch.sample_rows])
                chosen = self._sampler.sample(logits, batch.asks)
                for index, sampled in zip(batch.sampled, chosen, strict=True):
                    outcome[index] = self._counted(plan.works[index], sampled)
            elif self._backend.device.type == "cuda":
                # Without a token to wait for the step would be under way still, and the blocks
                # that it writes may be lent or given to others next.
                torch.cuda.current_stream().synchronize()
        return outcome

    def _counted(self, work: Work, sampled: Sampled) -> Sampled:
        """With the expert counts of its context, where a prompt is done."""
        if not self._model.config.moe_layers or work.sample is None or not work.sample.first:
            return sampled
        counts = context_counts(self._pool.expert_counts, work.block_ids)
        return replace(sampled, expert_counts=counts)

    def warm_up(self) -> None:
        """Prefill, decode and sample once, so that no user pays for lazy initialisation.

        For start-up only: it uses block 0, and leaves it zeroed.
        """
        first, second = Sampling(temperature=1.0), Sampling()
        for start, token_ids, sampling in ((0, (0, 0), first), (2, (0,), second)):
            end = start + len(token_ids)
            blocks = (BlockId(0),) * self._pool.layout.blocks_for(end)
            key = AttemptKey(RequestId("warm-up"), 0)
            self.run(Plan((Work(key, token_ids, start, blocks, SampleAt(sampling, 0)),)))
        self._pool.kv[0].zero_()
        self._pool.expert_counts[0].zero_()


def kv_layout(config: ModelConfig, block_size: int, dtype: str) -> KVLayout:
    """The layout of this model's KV pool.  dtype: "float32" or "bfloat16"."""
    counters = len(config.moe_layers) * config.moe.experts if config.moe else 0
    return KVLayout(config.layers, config.kv_heads, block_size, config.head_dim, dtype, counters)


def auto_dtype(device: torch.device) -> Literal["float32", "bfloat16"]:
    """What `ModelSpec.dtype` "auto" means on this device: bfloat16 but on CPUs that do not
    multiply in it; emulated, it is slower than float32."""
    if device.type == "cuda":
        return "bfloat16"
    has = torch.cpu.get_capabilities()
    return "bfloat16" if has.get("avx512_bf16") or has.get("amx_bf16") else "float32"
