"""Blocks between a GPU's memory and pinned host memory, beside what the GPU computes."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from core.errors import ConfigError, Stage


class PinnedCopy:
    """`engine.device.staging.Copy` on one stream per direction.  Thread-safe.

    Nothing is ordered against the stream that computes: no step is under way on blocks that are
    lent or landing.
    """

    def __init__(self, device: torch.device) -> None:
        self._streams = {kind: torch.cuda.Stream(device) for kind in ("cpu", "cuda")}

    def __call__(self, target: Tensor, source: Tensor, ids: Sequence[int]) -> Callable[[], None]:
        done = torch.cuda.Event()
        with torch.cuda.stream(self._streams[target.device.type]):
            for row in ids:
                target[row].copy_(source[row], non_blocking=True)
            done.record()

        def wait() -> None:
            done.synchronize()

        return wait


def pin(memory: Tensor) -> None:
    """Let the device reach this host memory directly, until the process ends.

    Raises ConfigError when the system lets it pin no more.
    """
    try:
        torch.cuda.check_error(
            torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        )
    except RuntimeError as error:
        raise ConfigError(
            f"kv.memory_mb: {memory.nbytes >> 20} MiB of host memory cannot be pinned: {error}; "
            "ask for less, or raise the limit of locked memory",
            stage=Stage.START,
            field="kv.memory_mb",
        ) from error
