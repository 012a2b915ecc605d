"""Attention over the paged KV pool by FlashInfer's kernels (Ye et al., arXiv:2501.01005).

FlashInfer plans a step on the host, once for all layers of one window, and then runs each layer.
A layer of our pool, kv[:, layer], is its paged KV cache [pages, 2, kv_heads, page_size, head_dim]
of layout HND; its kernels take the strides of K and V as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.model.attention import Span, StepContext
from engine.model.config import ModelConfig
from engine.model.paged import remember

LAYOUT = "HND"
HEAD_DIMS = (64, 128, 256)
WORKSPACE_BYTES = 128 << 20


@dataclass(slots=True)
class Planned:
    """One of FlashInfer's wrappers, and whose plan it carries."""

    wrapper: Any
    owner: object = None


@dataclass(frozen=True, slots=True)
class Shape:
    """What all plans of a model have in common."""

    config: ModelConfig
    page_size: int
    dtype: torch.dtype

    @staticmethod
    def of(config: ModelConfig, kv: Tensor) -> "Shape":
        return Shape(config, kv.shape[4], kv.dtype)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        config = self.config
        return config.heads, config.kv_heads, config.head_dim, self.page_size

    def options(self, window: int) -> dict[str, Any]:
        """FlashInfer counts how many positions before its own a query sees, -1 for all."""
        return {
            "window_left": window - 1,
            "sm_scale": self.config.scale,
            "q_data_type": self.dtype,
            "kv_data_type": self.dtype,
        }


class Kernels:
    """FlashInfer in this process: its workspace and its wrappers.  Engine thread only."""

    def __init__(self, library: Any, device: torch.device) -> None:
        """library: the module `flashinfer`."""
        self._library = library
        self.device = device
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._eager: dict[tuple[bool, int], Planned] = {}

    def eager(self, decodes: bool, window: int) -> Planned:
        """The wrapper of all steps of this kind; who plans it next takes it over."""
        if (decodes, window) not in self._eager:
            self._eager[decodes, window] = Planned(self._make(decodes))
        return self._eager[decodes, window]

    def fixed(self, sequences: int, pages: int) -> Any:
        """A wrapper of its own for recorded steps of single rows.  pages: most in one step."""

        def buffer(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=self.device)

        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            LAYOUT,
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=buffer(sequences + 1),
            paged_kv_indices_buffer=buffer(pages),
            paged_kv_last_page_len_buffer=buffer(sequences),
        )

    def settle(self) -> None:
        """Wait for what is under way.  A plan goes to the device from a host buffer that the next
        one overwrites; between two steps there is nothing to wait for."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _make(self, decodes: bool) -> Any:
        """With tensor cores: without, decoding serves few ratios of heads to KV heads."""
        if not decodes:
            return self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, LAYOUT)
        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, LAYOUT, use_tensor_cores=True
        )


class FlashInferAttention:
    """For one step."""

    def __init__(
        self, kernels: Kernels, config: ModelConfig, kv: Tensor, context: StepContext
    ) -> None:
        self._kernels = kernels
        self._shape = Shape.of(config, kv)
        self._kv = kv
        self._context = context
        self._decodes = all(span.queries == 1 for span in context.spans)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        remember(self._kv, layer, self._context, key, value)
        wrapper = self._planned(self._shape.config.windows[layer])
        out: Tensor = wrapper.run(query.contiguous(), self._kv[:, layer])
        return out

    def _planned(self, window: int) -> Any:
        """Planned again where another part of the step has come in between."""
        planned = self._kernels.eager(self._decodes, window)
        if planned.owner is not self:
            self._kernels.settle()
            plan = plan_decode if self._decodes else plan_prefill
            plan(planned.wrapper, self._context.spans, self._shape, window)
            planned.owner = self
        return planned.wrapper


class FixedFlashInfer:
    """Attention of steps of as many single rows as `context` has, to be recorded once."""

    def __init__(
        self,
        kernels: Kernels,
        config: ModelConfig,
        kv: Tensor,
        context: StepContext,
        width: int,
    ) -> None:
        """context: its tensors hold other cells in each step.  width: of the longest table."""
        self._shape = Shape.of(config, kv)
        self._kv = kv
        self._context = context
        rows = len(context.offsets)
        self._wrappers = {w: kernels.fixed(rows, rows * width) for w in sorted(set(config.windows))}

    def place(self, spans: Sequence[Span]) -> None:
        """Where the rows of the next step are, in order."""
        for window, wrapper in self._wrappers.items():
            plan_decode(wrapper, spans, self._shape, window)

    def attention(self) -> "FixedFlashInfer":
        """To be made within the recording."""
        return self

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        remember(self._kv, layer, self._context, key, value)
        wrapper = self._wrappers[self._shape.config.windows[layer]]
        out: Tensor = wrapper.run(query.contiguous(), self._kv[:, layer])
        return out


def plan_decode(wrapper: Any, spans: Sequence[Span], shape: Shape, window: int) -> None:
    """Spans of one row each."""
    tables = page_tables(spans, shape.page_size)
    wrapper.plan(*tables, *shape.sizes, **shape.options(window))


def plan_prefill(wrapper: Any, spans: Sequence[Span], shape: Shape, window: int) -> None:
    """Spans of any length, whose last positions are their queries."""
    firsts = [0, *(span.end_row for span in spans)]
    tables = page_tables(spans, shape.page_size)
    wrapper.plan(_int32(firsts), *tables, *shape.sizes, causal=True, **shape.options(window))


def page_tables(spans: Sequence[Span], page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """int32 in host memory, where plans are made: indptr [spans + 1], where the pages of each
    span begin in indices [pages]; last_page_len [spans], tokens in the last of its pages."""
    used = [span.block_ids[: -(-span.end // page_size)] for span in spans]
    indptr = [0]
    for pages in used:
        indptr.append(indptr[-1] + len(pages))
    last = [(span.end - 1) % page_size + 1 for span in spans]
    return _int32(indptr), _int32([page for pages in used for page in pages]), _int32(last)


def _int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
