"""What changes logits before a token is chosen, each in place and for the rows that ask only.

Meaning as in vLLM and transformers: bad words and the repetition penalty look at prompt and
output, presence and frequency penalties at the output alone.
"""

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from engine.policy.plan import SampleAt

_NEVER = float("-inf")
_WORD_BITS = 32


def restrict(logits: Tensor, mask: Tensor, rows: Sequence[int]) -> None:
    """Rule out what a grammar does not allow, in `rows`.

    logits [S, vocab] float32; mask [S, ceil(vocab / 32)] int32 as xgrammar packs it: token t is
    allowed where bit t % 32 of word t // 32 is set.
    """
    words = mask.to(logits.device)[rows]
    bits = torch.arange(_WORD_BITS, dtype=torch.int32, device=logits.device)
    allowed = (words[:, :, None] >> bits & 1).bool().flatten(1)[:, : logits.shape[-1]]
    logits[rows] = logits[rows].masked_fill(~allowed, _NEVER)


def forbid(logits: Tensor, bans: Sequence[Collection[int]]) -> None:
    """Rule out the tokens bans[i] in row i.

    A row that would have nothing left stays as it was: what a grammar demands, or a vocabulary
    that is banned whole, wins over a ban.
    """
    cells = _cells(bans, logits.device)
    touched = [i for i, tokens in enumerate(bans) if tokens]
    before = logits[touched]
    logits[cells] = _NEVER
    after = logits[touched]
    nothing_left = after.amax(-1, keepdim=True).isneginf()
    logits[touched] = torch.where(nothing_left, before, after)


def bias(logits: Tensor, asks: Sequence[SampleAt]) -> None:
    """Add `logit_bias`."""
    each = [ask.sampling.logit_bias for ask in asks]
    values = torch.tensor([b.bias for row in each for b in row], device=logits.device)
    cells = _cells([[b.token for b in row] for row in each], logits.device)
    logits.index_put_(cells, values, accumulate=True)


def penalise(logits: Tensor, asks: Sequence[SampleAt]) -> None:
    """Repetition penalty (Keskar et al. 2019, CTRL: divides positive logits, multiplies others),
    then frequency and presence penalties as OpenAI defines them."""
    rows = [i for i, ask in enumerate(asks) if ask.sampling.penalises]
    each, device = [asks[i] for i in rows], logits.device

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=device)[:, None]

    repetition = column([ask.sampling.repetition_penalty for ask in each])
    # A whole context is looked through only for those who asked for that.
    contexts = [ask.tokens if ask.sampling.repetition_penalty != 1 else () for ask in each]
    chosen = logits[rows]
    seen = torch.zeros_like(chosen, dtype=torch.bool)
    seen[_cells(contexts, device)] = True
    chosen = torch.where(
        seen, torch.where(chosen < 0, chosen * repetition, chosen / repetition), chosen
    )
    put_out = _cells([ask.tokens[ask.prompt :] for ask in each], device)
    counts = torch.zeros_like(chosen)
    counts.index_put_(put_out, torch.ones((), device=device), accumulate=True)
    chosen -= column([ask.sampling.frequency_penalty for ask in each]) * counts
    chosen -= column([ask.sampling.presence_penalty for ask in each]) * (counts > 0)
    logits[rows] = chosen


def banned(ask: SampleAt, eos_ids: Iterable[int]) -> set[int]:
    """Tokens that would complete a bad word, or end the output before `min_tokens`."""
    sampling = ask.sampling
    bans = {
        word.token_ids[-1]
        for word in sampling.bad_words
        if word.token_ids[:-1] == ask.tokens[len(ask.tokens) + 1 - len(word.token_ids) :]
    }
    if ask.index < sampling.min_tokens:
        bans.update(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            bans.update(eos_ids)
    return bans


def _cells(per_row: Sequence[Collection[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Indices (rows, tokens) of the tokens given per row."""
    rows = [i for i, tokens in enumerate(per_row) for _ in tokens]
    flat = [token for tokens in per_row for token in tokens]
    whole = torch.tensor([rows, flat], dtype=torch.int64, device=device)
    return whole[0], whole[1]
