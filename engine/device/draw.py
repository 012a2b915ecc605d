"""Drawing tokens at random: temperature, then min-p, then top-k, then top-p over what is left.

A token is drawn by inverting the cumulative distribution over the ranked tokens at one number in
[0, 1) that depends on (seed, position) alone; so a row's token depends on nothing else in the
batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from engine.device.rank import best
from engine.policy.plan import SampleAt

_FIRST_WIDTH = 128
_WIDEN = 8
_COLDEST = 1e-6
"""Below it float32 runs out: the quotient overflows, or the temperature itself becomes 0."""


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) with 53 random bits for output token `index` of a request."""
    digest = blake2b(f"{seed}/{index}".encode(), digest_size=8, person=b"trireme.sampling").digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


@dataclass(frozen=True, slots=True)
class _Params:
    """Columns [S, 1]: temperature, min_p float32, top_k int64 (0 off), top_p and point float64.

    widest: the largest top_k.  cuts: any row has a min_p.
    """

    temperature: Tensor
    min_p: Tensor
    top_k: Tensor
    top_p: Tensor
    point: Tensor
    widest: int
    cuts: bool

    @staticmethod
    def of(asks: Sequence[SampleAt], logits: Tensor) -> "_Params":
        vocab = logits.shape[-1]

        def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=logits.device)[:, None]

        each = [ask.sampling for ask in asks]
        top_k = [s.top_k if 0 < s.top_k < vocab else 0 for s in each]
        points = [uniform(ask.sampling.seed, ask.index) for ask in asks]
        return _Params(
            column([max(s.temperature, _COLDEST) for s in each], torch.float32),
            column([s.min_p for s in each], torch.float32),
            column(top_k, torch.int64),
            column([s.top_p for s in each], torch.float64),
            column(points, torch.float64),
            widest=max(top_k),
            cuts=any(s.min_p > 0 for s in each),
        )


def draw(logits: Tensor, asks: Sequence[SampleAt], width: int = _FIRST_WIDTH) -> list[int]:
    """logits [S, vocab] float32 -> S tokens.  S is at least 1, every temperature above 0.

    Ranks the best `width` tokens, and more only for rows whose point lies beyond them: sorting a
    whole vocabulary costs far more, and the few best tokens nearly always decide.
    """
    params = _Params.of(asks, logits)
    vocab = logits.shape[-1]
    weights = ((logits - logits.amax(-1, keepdim=True)) / params.temperature).exp_()
    if params.cuts:
        weights.masked_fill_(weights < params.min_p, 0.0)
    total = weights.sum(-1, keepdim=True, dtype=torch.float64)
    width = min(vocab, max(width, params.widest))
    ranked = best(logits, width)
    mass = weights.gather(-1, ranked).cumsum(-1, dtype=torch.float64)
    choice, decided = _invert(mass, total, params)
    tokens: list[int] = ranked.gather(-1, choice).squeeze(-1).tolist()
    if width < vocab:
        later = [i for i, known in enumerate(decided.squeeze(-1).tolist()) if not known]
        if later:
            wider = draw(logits[later], [asks[i] for i in later], width * _WIDEN)
            for i, token in zip(later, wider, strict=True):
                tokens[i] = token
    return tokens


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
