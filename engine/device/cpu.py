"""The backend of CPUs: the kernels of `engine.native`."""

from dataclasses import dataclass

import torch

from engine.device.pool import KVPool
from engine.model.attention import Attention, StepContext
from engine.model.config import ModelConfig
from engine.native.attention import NativeAttention
from engine.native.library import Library, open_library
from engine.native.ops import NativeOps


@dataclass(frozen=True, slots=True)
class NativeBackend:
    """Activations and sums in float32, weights and KV as they are stored."""

    library: Library
    ops: NativeOps
    threads: int
    name: str = "native"

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @staticmethod
    def open() -> "NativeBackend":
        """On the threads torch has now.  Raises NativeUnavailable."""
        library, threads = open_library(), torch.get_num_threads()
        return NativeBackend(library, NativeOps(library, threads), threads)

    def attention(self, config: ModelConfig, pool: KVPool, context: StepContext) -> Attention:
        return NativeAttention(
            self.library, pool.kv, context, config.windows, config.scale, self.threads
        )
