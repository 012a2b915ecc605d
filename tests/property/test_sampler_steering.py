"""Everything that changes logits before a token is chosen, against transformers and formulas."""

from collections.abc import Collection, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from core.errors import InternalError
from core.sampling import BadWord, Grammar, GrammarKind, LogitBias, Sampling
from engine.device.draw import uniform
from engine.device.logits import restrict
from engine.device.sampler import Sampler
from engine.policy.plan import SampleAt

VOCAB = 40
EOS = (0, 7)
SAMPLER = Sampler(EOS)
GRAMMAR = Grammar(GrammarKind.REGEX, "a")

ids = st.integers(0, VOCAB - 1)
contexts = st.lists(ids, min_size=1, max_size=12).map(tuple)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.8, 2.0]),
    top_p=st.sampled_from([1.0, 0.7]),
    top_k=st.sampled_from([0, 12]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**63 - 1),
    min_tokens=st.integers(0, 4),
    stop_token_ids=st.lists(ids, max_size=2).map(tuple),
    ignore_eos=st.booleans(),
    repetition_penalty=st.sampled_from([1.0, 0.6, 1.7]),
    presence_penalty=st.sampled_from([0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.9, -0.4]),
    logit_bias=st.dictionaries(ids, st.floats(-5, 5, width=32), max_size=4).map(
        lambda found: tuple(LogitBias(*item) for item in found.items())
    ),
    bad_words=st.lists(
        st.lists(ids, min_size=1, max_size=3).map(lambda w: BadWord(tuple(w))), max_size=4
    ).map(tuple),
    logprobs=st.sampled_from([None, 0, 3]),
)


@st.composite
def asks(draw: st.DrawFn) -> SampleAt:
    """As a sequence makes them, with a bad word about to be completed now and then."""
    sampling, tokens = draw(samplings), draw(contexts)
    if draw(st.booleans()):
        word = BadWord((*tokens[-draw(st.integers(1, 2)) :], draw(ids)))
        sampling = replace(sampling, bad_words=(*sampling.bad_words, word))
    prompt = draw(st.integers(1, len(tokens)))
    return SampleAt(sampling, len(tokens) - prompt, tokens, prompt)


def rows(seed: int, count: int) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def steered(row: torch.Tensor, ask: SampleAt) -> torch.Tensor:
    """[vocab] in, [vocab] out: transformers' processors in their order, OpenAI's formula last."""
    sampling, processors = ask.sampling, LogitsProcessorList()
    if sampling.bad_words:
        words = [list(word.token_ids) for word in sampling.bad_words]
        processors.append(NoBadWordsLogitsProcessor(words))
    ends = [*sampling.stop_token_ids, *(() if sampling.ignore_eos else EOS)]
    if ends:
        processors.append(MinNewTokensLengthLogitsProcessor(ask.prompt, sampling.min_tokens, ends))
    if sampling.logit_bias:
        biases = {(each.token,): each.bias for each in sampling.logit_bias}
        processors.append(SequenceBiasLogitsProcessor(biases))
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    scores = processors(torch.tensor([ask.tokens]), row[None].clone())[0]
    for token in range(VOCAB):
        count = ask.tokens[ask.prompt :].count(token)
        scores[token] -= sampling.frequency_penalty * count
        scores[token] -= sampling.presence_penalty * (count > 0)
    return scores


def chances(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """[vocab] probabilities: transformers' warpers in vLLM's order."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    nothing = torch.empty(1, 0, dtype=torch.int64)
    found: torch.Tensor = warpers(nothing, scores[None].double())[0].softmax(-1)
    return found


def possible(scores: torch.Tensor, ask: SampleAt) -> set[int]:
    """The token by the book; at random, whatever lies within 1e-5 of the position's number."""
    if ask.sampling.temperature == 0:
        return {int(scores.argmax())}
    order = scores.sort(descending=True, stable=True).indices
    total = chances(scores, ask.sampling)[order].cumsum(0)
    point = uniform(ask.sampling.seed, ask.index)
    near = [min(max(point + d, 0.0), 1 - 1e-9) for d in (-1e-5, 0.0, 1e-5)]
    return {int(order[torch.searchsorted(total, p, right=True)]) for p in near}


@settings(max_examples=250, deadline=None)
@given(ask=asks(), seed=st.integers(0, 999))
def test_tokens_are_those_of_transformers_processors(ask: SampleAt, seed: int) -> None:
    logits = rows(seed, 1)
    (sampled,) = SAMPLER.sample(logits, [ask])
    assert sampled.token in possible(steered(logits[0], ask), ask)


@settings(max_examples=80, deadline=None)
@given(some=st.lists(asks(), min_size=2, max_size=6), seed=st.integers(0, 999))
def test_a_row_depends_on_nothing_else_in_its_batch(some: list[SampleAt], seed: int) -> None:
    logits = rows(seed, len(some))
    before = logits.clone()
    together = SAMPLER.sample(logits, some)
    assert torch.equal(logits, before), "the caller's logits are not ours to change"
    assert together == [SAMPLER.sample(logits[i : i + 1], [ask])[0] for i, ask in enumerate(some)]
    assert SAMPLER.sample(logits.flip(0), some[::-1]) == together[::-1]


def test_a_penalty_shifts_the_distribution_by_its_formula() -> None:
    """Pearson's chi-square over all tokens; fixed seeds, so it never flickers."""
    draws = 4000
    sampling = Sampling(1.0, seed=3, presence_penalty=0.5, frequency_penalty=0.7)
    row = torch.linspace(1, -1, 8)
    expected = (row - torch.tensor([1.9, 1.2, 0, 0, 0, 0, 0, 0])).softmax(0) * draws
    context = SampleAt(sampling, 0, (3, 0, 0, 1), 1)
    many = [replace(context, index=i) for i in range(draws)]
    drawn = [s.token for s in SAMPLER.sample(row.expand(draws, -1).contiguous(), many)]
    counts = torch.tensor([drawn.count(token) for token in range(8)])
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert torch.special.gammaincc(torch.tensor(7 / 2), statistic / 2) > 0.01


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_before_min_tokens_no_end_is_chosen_however_likely(ignore_eos: bool) -> None:
    sampling = Sampling(min_tokens=2, stop_token_ids=(3,), ignore_eos=ignore_eos)
    logits = torch.zeros(3, VOCAB)
    logits[:, 3], logits[:, 7], logits[:, 5] = 9, 8, 7
    chosen = SAMPLER.sample(logits, [SampleAt(sampling, index) for index in range(3)])
    assert [s.token for s in chosen] == [7 if ignore_eos else 5] * 2 + [3]


def packed(allowed: Sequence[Collection[int] | None]) -> torch.Tensor:
    """[S, 2] int32 as xgrammar packs 40 tokens; None: all bits."""
    words = []
    for each in allowed:
        bits = sum(1 << t for t in each) if each is not None else (1 << 64) - 1
        words.append([bits & 0xFFFFFFFF, bits >> 32])
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)


class Allowing:
    """Masks as a compiled grammar would give them."""

    def __init__(self, *allowed: Collection[int] | None) -> None:
        self._allowed = allowed

    def mask(self, asks: Sequence[SampleAt]) -> torch.Tensor | None:
        assert len(asks) == len(self._allowed)
        return packed(self._allowed)


@given(allowed=st.lists(st.none() | st.sets(ids, min_size=1), min_size=1, max_size=4))
def test_a_mask_leaves_exactly_what_it_allows(allowed: list[set[int] | None]) -> None:
    logits = rows(1, len(allowed))
    ruled = logits.clone()
    restrict(ruled, packed(allowed), [i for i, each in enumerate(allowed) if each is not None])
    for before, after, each in zip(logits, ruled, allowed, strict=True):
        kept = range(VOCAB) if each is None else each
        assert {t for t in range(VOCAB) if after[t] == before[t]} == set(kept)
        assert not after.isnan().any()


def test_a_grammar_rules_its_own_rows_and_logprobs_stay_the_models() -> None:
    logits = rows(2, 2)
    free = Sampling(logprobs=1)
    sampler = Sampler(EOS, Allowing({31, 33}, None))
    ruled, other = sampler.sample(
        logits, [SampleAt(replace(free, grammar=GRAMMAR), 0), SampleAt(free, 0)]
    )
    assert ruled.token == max((31, 33), key=lambda t: logits[0, t])
    assert other == SAMPLER.sample(logits[1:], [SampleAt(free, 0)])[0]
    assert ruled.logprobs is not None
    assert ruled.logprobs.logprob == pytest.approx(logits[0].log_softmax(0)[ruled.token].item())
    assert ruled.logprobs.top[0].token == logits[0].argmax()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_a_grammar_demands_wins_over_bans(temperature: float) -> None:
    """Its end of sequence before min_tokens, a word that is a bad word: there is nothing else."""
    sampling = Sampling(temperature, min_tokens=5, bad_words=(BadWord((9,)),), grammar=GRAMMAR)
    asks = [SampleAt(sampling, i, (1,), 1) for i in range(3)]
    sampler = Sampler(EOS, Allowing({7}, {9}, {9, 11}))
    assert [s.token for s in sampler.sample(rows(3, 3), asks)] == [7, 9, 11]


def test_a_grammar_that_nobody_can_follow_is_an_error() -> None:
    with pytest.raises(InternalError, match="grammar"):
        SAMPLER.sample(rows(0, 1), [SampleAt(Sampling(grammar=GRAMMAR), 0)])


@given(
    some=st.lists(st.integers(0, VOCAB + 9) | st.none(), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_logprobs_are_log_softmax_of_the_raw_logits_best_first(
    some: list[int | None], seed: int
) -> None:
    """Of equal logits the lower id first; whatever steers the choice changes none of it."""
    logits = (rows(seed, len(some)) * 2).round() / 2
    bias = (LogitBias(4, 100.0),)
    asks = [SampleAt(Sampling(1.0, logprobs=n, logit_bias=bias), i) for i, n in enumerate(some)]
    for row, count, sampled in zip(logits, some, SAMPLER.sample(logits, asks), strict=True):
        if count is None:
            assert sampled.logprobs is None
            continue
        assert sampled.logprobs is not None
        plain = row.log_softmax(0).tolist()
        order = sorted(range(VOCAB), key=lambda t: (-row[t].item(), t))[:count]
        assert sampled.token == 4
        assert sampled.logprobs.logprob == pytest.approx(plain[4])
        assert [t.token for t in sampled.logprobs.top] == order
        assert [t.logprob for t in sampled.logprobs.top] == pytest.approx([plain[t] for t in order])
