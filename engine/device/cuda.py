"""The backends of GPUs: FlashInfer where it is installed and serves the model, else FlexAttention.

What is not attention is plain torch, on the device that the weights are on.
"""

import logging
from importlib import import_module
from importlib.util import find_spec

import torch
from torch.nn.attention.flex_attention import flex_attention

from engine.cuda.flashinfer import HEAD_DIMS, FixedFlashInfer, FlashInferAttention, Kernels
from engine.cuda.flex import Attend, FixedFlex, FlexAttention, check, groups_of
from engine.device.graphs import RecordableBackend
from engine.device.pool import KVPool
from engine.model.attention import StepContext
from engine.model.config import ModelConfig
from engine.model.ops import Ops, TorchOps

log = logging.getLogger(__name__)


class FlexBackend:
    """`RecordableBackend` by FlexAttention: any model and dtype."""

    name = "flex"

    def __init__(self, dtype: torch.dtype, device: torch.device, attend: Attend) -> None:
        """attend: `flex_attention`, compiled or as it is."""
        self.ops: Ops = TorchOps(dtype)
        self.device = device
        self._attend = attend

    def attention(self, config: ModelConfig, pool: KVPool, context: StepContext) -> FlexAttention:
        groups = groups_of(context.spans, pool.kv)
        return FlexAttention(pool.kv, context, groups, config.windows, config.scale, self._attend)

    def fixed(
        self, config: ModelConfig, pool: KVPool, context: StepContext, width: int
    ) -> FixedFlex:
        return FixedFlex(pool.kv, context, width, config.windows, config.scale, self._attend)


class FlashInferBackend:
    """`RecordableBackend` by FlashInfer: bfloat16, and heads of `HEAD_DIMS`."""

    name = "flashinfer"

    def __init__(self, dtype: torch.dtype, kernels: Kernels) -> None:
        self.ops: Ops = TorchOps(dtype)
        self.device = kernels.device
        self._kernels = kernels

    def attention(
        self, config: ModelConfig, pool: KVPool, context: StepContext
    ) -> FlashInferAttention:
        return FlashInferAttention(self._kernels, config, pool.kv, context)

    def fixed(
        self, config: ModelConfig, pool: KVPool, context: StepContext, width: int
    ) -> FixedFlashInfer:
        return FixedFlashInfer(self._kernels, config, pool.kv, context, width)


def cuda_backend(pool: KVPool) -> RecordableBackend:
    """For a model that computes in the type of this pool, where it lies.

    Raises ConfigError for a pool that none can serve.
    """
    dtype, device = pool.kv.dtype, pool.kv.device
    serves = dtype is torch.bfloat16 and pool.layout.head_dim in HEAD_DIMS
    if serves and find_spec("flashinfer") is not None:
        return FlashInferBackend(dtype, Kernels(import_module("flashinfer"), device))
    log.warning(
        "FlexAttention instead of FlashInfer, which %s",
        "is not installed" if serves else f"takes bfloat16 and heads of {HEAD_DIMS}",
    )
    check(pool.kv)
    return FlexBackend(dtype, device, torch.compile(flex_attention, fullgraph=True))
