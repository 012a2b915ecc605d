"""Executes plans: the model, its KV pool and the sampler put together.  Engine thread only."""

from typing import Literal

import torch
from torch import Tensor

from core.errors import InternalError, Stage
from core.ids import AttemptKey, BlockId, RequestId
from core.kvlayout import KVLayout
from core.messages import Sampling
from engine.device.batch import build_batch
from engine.device.pool import DTYPES, KVPool
from engine.device.sampler import sample
from engine.model.attention import PagedAttention
from engine.model.config import ModelConfig
from engine.model.llama import Llama
from engine.policy.plan import Plan, SampleAt, Work


class Runner:
    """`engine.loop.StepRunner` over one model and one pool."""

    def __init__(self, model: Llama, pool: KVPool) -> None:
        """Raises InternalError when the pool is laid out for another model."""
        fitting = kv_layout(model.config, pool.layout.block_size, pool.layout.dtype)
        if pool.layout != fitting or model.dtype != DTYPES[pool.layout.dtype]:
            raise InternalError(
                f"model {model.config.name} in {model.dtype} does not fit a KV pool laid out as"
                f" {pool.layout}; make the layout with kv_layout",
                stage=Stage.START,
            )
        self._model = model
        self._pool = pool

    def run(self, plan: Plan) -> list[int | None]:
        """Write the K/V of all works; the sampled token of each work, None where none is asked.

        Raises InternalError for a plan that no scheduler should make.
        """
        tokens: list[int | None] = [None] * len(plan.works)
        if not plan.works:
            return tokens
        with torch.inference_mode():
            batch = build_batch(plan, self._pool.layout)
            attention = PagedAttention(self._pool.kv, batch.context)
            hidden = self._model.hidden(batch.token_ids, batch.positions, attention)
            if batch.asks:
                chosen = sample(self._model.logits(hidden[batch.sample_rows]), batch.asks)
                for index, token in zip(batch.sampled, chosen, strict=True):
                    tokens[index] = token
        return tokens

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


def build_runner(
    config: ModelConfig,
    weights: dict[str, Tensor],
    layout: KVLayout,
    blocks: int,
    buffer: memoryview,
) -> Runner:
    """Takes over `weights` (empties it) and views `buffer`.  Raises InternalError on a misfit."""
    return Runner(Llama(config, weights), KVPool(layout, blocks, buffer))


def kv_layout(config: ModelConfig, block_size: int, dtype: str) -> KVLayout:
    """The layout of this model's KV pool.  dtype: "float32" or "bfloat16"."""
    return KVLayout(config.layers, config.kv_heads, block_size, config.head_dim, dtype)


def auto_dtype() -> Literal["float32", "bfloat16"]:
    """What `ModelSpec.dtype` "auto" means on this machine: bfloat16 only where the CPU
    multiplies in it; emulated, it is slower than float32."""
    has = torch.cpu.get_capabilities()
    return "bfloat16" if has.get("avx512_bf16") or has.get("amx_bf16") else "float32"
