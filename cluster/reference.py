"""The plain loop in this process, on the files that the cluster serves."""

from collections.abc import Sequence

import torch

from engine.device.pool import DTYPES
from engine.device.runner import auto_dtype
from engine.model import refs
from engine.model.build import build_decoder
from engine.model.config_file import load_config
from engine.model.ops import TorchOps
from engine.model.weights import load_weights
from engine.reference import Step, greedy


class Reference:
    """On the CPU.  dtype: "auto" means what it means to a worker of this cluster: one that does not
    ask for a GPU is shown none."""

    def __init__(self, ref: str, dtype: str, device: str) -> None:
        """Blocks for seconds.  Raises ConfigError, ModelUnsupported."""
        files = refs.resolve(ref)
        self._config = load_config(files)
        workers = torch.device("cuda" if device == "cuda" else "cpu")
        self.dtype = auto_dtype(workers) if dtype == "auto" else dtype
        ops = TorchOps(DTYPES[self.dtype])
        weights = load_weights(files, self._config, ops.dtype)
        self._model = build_decoder(self._config, weights, ops)

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    def greedy(self, prompt: Sequence[int], count: int) -> list[Step]:
        """`count` steps; the end-of-sequence token ends nothing."""
        return greedy(self._model, self._config, prompt, count, eos_ids=())
