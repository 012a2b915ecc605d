"""CUDA graphs: kernels launched once by Python, and from then on all at once by the device.

As in torch's documentation: run on a side stream until all is compiled and allocated, capture,
replay.  What a recording reads and writes stays where it was in memory.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_RUNS_AHEAD = 2


class Recorder:
    """`engine.device.graphs.Record`.  Its recordings share memory, so one replays at a time, and
    what it gives is good until the next."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, body: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Raises RuntimeError for a body that waits for the device."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_RUNS_AHEAD):
                body()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            out = body()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay
