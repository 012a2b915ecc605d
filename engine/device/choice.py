"""Which device and which backend this machine gets; for those of GPUs see `engine.device.cuda`."""

import logging

import torch

from core.errors import ConfigError, Stage
from engine.device.backend import Backend, TorchBackend
from engine.device.cpu import NativeBackend
from engine.native.build import NativeUnavailable

log = logging.getLogger(__name__)


def choose_device(wanted: str) -> torch.device:
    """wanted: `ModelSpec.device`.  Raises ConfigError for a GPU that this process does not see."""
    sees = torch.cuda.is_available()
    if wanted == "cuda" and not sees:
        raise ConfigError(
            "model.device: cuda, and this process sees no GPU; install a build of torch with CUDA "
            "and NVIDIA's driver, or set cpu",
            stage=Stage.START,
            field="model.device",
        )
    return torch.device("cuda", 0) if sees and wanted != "cpu" else torch.device("cpu")


def best_backend(dtype: torch.dtype) -> Backend:
    """The fastest on this machine's CPU that computes at least as precisely as `dtype`."""
    try:
        return NativeBackend.open()
    except NativeUnavailable as why:
        log.warning("no CPU kernels: %s; plain torch computes the same, more slowly", why)
        return TorchBackend.of(dtype)
