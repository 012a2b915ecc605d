"""What a model computes with on this machine: its operations and its attention."""

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.device.pool import KVPool
from engine.model.attention import Attention, StepContext
from engine.model.config import ModelConfig
from engine.model.ops import Ops, TorchOps
from engine.model.shared_prefix import share_prefixes


class Backend(Protocol):
    """name: shown to users.  ops: what the model is built from.  device: where tensors live."""

    @property
    def name(self) -> str: ...
    @property
    def ops(self) -> Ops: ...
    @property
    def device(self) -> torch.device: ...

    def attention(self, config: ModelConfig, pool: KVPool, context: StepContext) -> Attention:
        """For one step."""
        ...


@dataclass(frozen=True, slots=True)
class TorchBackend:
    """Plain torch: runs everywhere, the reference of the others."""

    ops: Ops
    device: torch.device
    name: str = "torch"

    @staticmethod
    def of(dtype: torch.dtype, device: torch.device | None = None) -> "TorchBackend":
        return TorchBackend(TorchOps(dtype), device or torch.device("cpu"))

    def attention(self, config: ModelConfig, pool: KVPool, context: StepContext) -> Attention:
        return share_prefixes(pool.kv, context, config)
