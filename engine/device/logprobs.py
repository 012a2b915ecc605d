"""Log probabilities of what was chosen and of the likeliest alternatives."""

from collections.abc import Sequence

import torch
from torch import Tensor

from core.sampling import TokenLogprob, TokenLogprobs
from engine.device.rank import best
from engine.policy.plan import SampleAt


def logprobs(
    logits: Tensor, tokens: Sequence[int], asks: Sequence[SampleAt]
) -> dict[int, TokenLogprobs]:
    """logits [S, vocab] float32 as the model made them, the S chosen tokens -> by row, for the
    rows that ask.  log_softmax of the raw logits, as OpenAI's and vLLM's `raw_logprobs`."""
    wanted = [i for i, ask in enumerate(asks) if ask.sampling.logprobs is not None]
    if not wanted:
        return {}
    counts = [asks[i].sampling.logprobs or 0 for i in wanted]
    raw = logits[wanted]
    chosen = torch.tensor([[tokens[i]] for i in wanted], device=logits.device)
    ids = best(raw, min(max(counts), raw.shape[-1]))
    values = raw.log_softmax(-1).gather(-1, torch.cat((chosen, ids), -1)).tolist()
    return {
        row: TokenLogprobs(own, tuple(map(TokenLogprob, alternatives[:count], others)))
        for row, count, alternatives, (own, *others) in zip(
            wanted, counts, ids.tolist(), values, strict=True
        )
    }
