"""FlashInfer at its boundary, in plain torch: the wrappers with the parameters that their
documentation gives (docs.flashinfer.ai, 0.7), and with its demands on what comes in.

A wrapper forgets all but what it was told to keep: an eager one owns nothing of the caller's, one
for CUDA graphs reads the caller's buffers, which only `plan` may write.
"""

import torch
from torch import Tensor


def _checked(name: str, x: Tensor, length: int) -> Tensor:
    assert x.dtype == torch.int32, name
    assert x.shape == (length,), name
    return x.clone()


class _Wrapper:
    def __init__(self, workspace: Tensor, kv_layout: str) -> None:
        assert workspace.dtype == torch.uint8
        assert not workspace.any(), "to be zero for its first use"
        assert kv_layout == "HND"
        self.plans = 0

    def _keep(
        self,
        tables: tuple[Tensor, Tensor, Tensor],
        sizes: tuple[int, int, int, int],
        types: tuple[torch.dtype, torch.dtype],
        window_left: int,
        sm_scale: float,
    ) -> None:
        indptr, indices, last_page_len = tables
        batch = len(last_page_len)
        self.indptr = _checked("indptr", indptr, batch + 1)
        self.indices = _checked("indices", indices, int(indptr[-1]))
        self.last_page_len = _checked("last_page_len", last_page_len, batch)
        assert int(indptr[0]) == 0
        assert (indptr.diff() >= 1).all()
        assert ((last_page_len >= 1) & (last_page_len <= sizes[3])).all()
        self.sizes, self.types = sizes, types
        self.window_left, self.sm_scale = window_left, sm_scale
        self.plans += 1

    def _attend(self, q: Tensor, paged_kv_cache: Tensor, rows: list[int]) -> Tensor:
        """rows: where the queries of each request begin, and where the last ones end."""
        heads, kv_heads, head_dim, page_size = self.sizes
        assert q.shape[1:] == (heads, head_dim)
        assert q.is_contiguous()
        assert (q.dtype, paged_kv_cache.dtype) == self.types
        assert paged_kv_cache.shape[1:] == (2, kv_heads, page_size, head_dim)
        assert paged_kv_cache.stride(-1) == 1
        out = torch.empty_like(q)
        for i, last in enumerate(self.last_page_len.tolist()):
            pages = self.indices[int(self.indptr[i]) : int(self.indptr[i + 1])].long()
            length = (len(pages) - 1) * page_size + last
            cache = paged_kv_cache[pages].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
            of = slice(rows[i], rows[i + 1])
            own = torch.arange(length - (of.stop - of.start), length)[:, None]
            behind = own - torch.arange(length)
            seen = behind >= 0
            if self.window_left >= 0:
                seen &= behind <= self.window_left
            group = heads // kv_heads
            keys, values = (x.repeat_interleave(group, 0).float() for x in cache)
            scores = q[of].transpose(0, 1).float() @ keys.mT * self.sm_scale
            shares = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            out[of] = (shares @ values).transpose(0, 1).to(q.dtype)
        return out


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        super().__init__(float_workspace_buffer, kv_layout)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        assert causal
        assert head_dim_vo is custom_mask is packed_custom_mask is None
        self._keep(
            (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len),
            (num_qo_heads, num_kv_heads, head_dim_qk, page_size),
            (q_data_type, kv_data_type or q_data_type),
            window_left,
            head_dim_qk**-0.5 if sm_scale is None else sm_scale,
        )
        self.qo_indptr = _checked("qo_indptr", qo_indptr, len(paged_kv_indptr))

    def run(self, q: Tensor, paged_kv_cache: Tensor) -> Tensor:
        rows = self.qo_indptr.tolist()
        assert rows[-1] == len(q)
        return self._attend(q, paged_kv_cache, rows)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        assert use_tensor_cores
        self._buffers = None
        if use_cuda_graph:
            self._buffers = (
                paged_kv_indptr_buffer,
                paged_kv_indices_buffer,
                paged_kv_last_page_len_buffer,
            )
            assert all(b.dtype == torch.int32 for b in self._buffers)
            assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
    ) -> None:
        self._keep(
            (indptr, indices, last_page_len),
            (num_qo_heads, num_kv_heads, head_dim, page_size),
            (q_data_type, kv_data_type or q_data_type),
            window_left,
            head_dim**-0.5 if sm_scale is None else sm_scale,
        )
        if self._buffers is not None:
            for buffer, value in zip(
                self._buffers, (self.indptr, self.indices, self.last_page_len), strict=True
            ):
                assert buffer is self._buffers[1] or len(buffer) == len(value), "a fixed batch"
                buffer[: len(value)] = value
            self.indptr, self.indices, self.last_page_len = self._buffers

    def run(self, q: Tensor, paged_kv_cache: Tensor) -> Tensor:
        assert len(q) == len(self.last_page_len)
        return self._attend(q, paged_kv_cache, list(range(len(q) + 1)))
