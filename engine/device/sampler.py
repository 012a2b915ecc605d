"""Choosing tokens from logits, for a whole batch at once.

Order as in vLLM and transformers: temperature, then top-k, then top-p over what is left.
Tokens are ranked by (logit falling, id rising), a total order, and a token is drawn by inverting
the cumulative distribution at one number in [0, 1) that depends on (seed, position) alone; so a
row's token depends on nothing else in the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from engine.policy.plan import SampleAt

_FIRST_WIDTH = 256
_WIDEN = 8


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) with 53 random bits for output token `index` of a request."""
    digest = blake2b(f"{seed}/{index}".encode(), digest_size=8, person=b"trireme.sampling").digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample(logits: Tensor, asks: Sequence[SampleAt]) -> list[int]:
    """logits [S, vocab] float32 -> S token ids.  Temperature 0 is argmax: of equal logits the
    lowest id."""
    if not asks:
        return []
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    drawn = [i for i, ask in enumerate(asks) if ask.sampling.temperature > 0]
    if drawn:
        chosen = _draw(logits[drawn], _Params.of([asks[i] for i in drawn], logits.shape[-1]))
        for i, token in zip(drawn, chosen, strict=True):
            tokens[i] = token
    return tokens


_COLDEST = 1e-6
"""Below it float32 runs out: the quotient overflows, or the temperature itself becomes 0."""


@dataclass(frozen=True, slots=True)
class _Params:
    """Columns [S, 1]: temperature float32, top_k int64 (0 off), top_p and point float64."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    point: Tensor

    @staticmethod
    def of(asks: Sequence[SampleAt], vocab: int) -> "_Params":
        def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype)[:, None]

        each = [ask.sampling for ask in asks]
        points = [uniform(ask.sampling.seed, ask.index) for ask in asks]
        return _Params(
            column([max(s.temperature, _COLDEST) for s in each], torch.float32),
            column([s.top_k if 0 < s.top_k < vocab else 0 for s in each], torch.int64),
            column([s.top_p for s in each], torch.float64),
            column(points, torch.float64),
        )


def _draw(logits: Tensor, params: _Params) -> list[int]:
    """Ranks only as many tokens as it takes to reach every row's point: sorting a whole
    vocabulary costs far more, and the few best tokens nearly always decide."""
    vocab = logits.shape[-1]
    weights = ((logits - logits.amax(-1, keepdim=True)) / params.temperature).exp_()
    total = weights.sum(-1, keepdim=True, dtype=torch.float64)
    keys = _rank_keys(logits)
    width = min(vocab, max(_FIRST_WIDTH, int(params.top_k.max())))
    while True:
        ranked = vocab - 1 - (keys.topk(width).values & 0xFFFFFFFF)
        mass = weights.gather(-1, ranked).cumsum(-1, dtype=torch.float64)
        choice, decided = _invert(mass, total, params)
        if width == vocab or bool(decided.all()):
            tokens: list[int] = ranked.gather(-1, choice).squeeze(-1).tolist()
            return tokens
        width = min(vocab, width * _WIDEN)


def _rank_keys(logits: Tensor) -> Tensor:
    """[S, vocab] int64, all different in a row: larger for a larger logit, then for a lower id.

    Reads a float's bits as an integer of the same order, which needs the negative ones flipped
    and -0.0 made 0.0.
    """
    bits = (logits + 0.0).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    return (ordered << 32) | torch.arange(logits.shape[-1] - 1, -1, -1)


def _invert(mass: Tensor, total: Tensor, params: _Params) -> tuple[Tensor, Tensor]:
    """Rank of the drawn token [S, 1], and whether the ranks at hand were enough to tell.

    mass [S, W]: cumulated weights of the W best tokens; total [S, 1]: weight of all.
    """
    in_top_k = mass.gather(-1, (params.top_k - 1).clamp(min=0))
    limit = torch.where(params.top_k > 0, in_top_k, total)
    nucleus = params.top_p < 1
    needed = params.top_p * limit
    last = torch.searchsorted(mass, needed).clamp_(max=mass.shape[-1] - 1)
    kept = torch.where(nucleus, mass.gather(-1, last), limit)
    choice = torch.searchsorted(mass, params.point * kept, right=True)
    decided = torch.where(nucleus, mass[:, -1:] >= needed, choice < mass.shape[-1])
    return torch.minimum(choice, last), decided
