"""Sampling: the exact distribution, the exact support, and nothing but (seed, position)."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.sampling import Sampling
from engine.device.draw import uniform
from engine.device.rank import best
from engine.device.sampler import Sampler
from engine.policy.plan import SampleAt

DRAWS = 4000
LOGITS = [2.0, -1.0, 0.5, 3.0, 0.5, -4.0, 1.5, 0.0, 2.5, -0.5]

SAMPLER = Sampler(eos_ids=())

SETTINGS = {
    "plain": Sampling(temperature=1.0, seed=3),
    "hot": Sampling(temperature=2.5, seed=4),
    "cold": Sampling(temperature=0.4, seed=5),
    "top_k": Sampling(temperature=1.5, top_k=4, seed=6),
    "top_p": Sampling(temperature=1.5, top_p=0.7, seed=7),
    "top_k_then_top_p": Sampling(temperature=2.0, top_k=5, top_p=0.8, seed=8),
    "min_p": Sampling(temperature=1.5, min_p=0.2, seed=9),
    "min_p_then_top_p": Sampling(temperature=2.0, min_p=0.15, top_p=0.8, seed=10),
    "all_cuts": Sampling(temperature=3.0, min_p=0.2, top_k=6, top_p=0.9, seed=11),
}


def distribution(logits: Sequence[float], sampling: Sampling) -> dict[int, float]:
    """Token -> probability, by the book, in falling order of (logit, -id)."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    scaled = torch.tensor([logits[i] for i in order], dtype=torch.float64) / sampling.temperature
    scaled = scaled[scaled.exp() >= sampling.min_p * scaled[0].exp()]
    if sampling.top_k:
        scaled = scaled[: sampling.top_k]
    probabilities = scaled.softmax(0)
    before = probabilities.cumsum(0) - probabilities
    kept = max(1, int((before < sampling.top_p - 1e-12).sum()))
    shares = (probabilities[:kept] / probabilities[:kept].sum()).tolist()
    return dict(zip(order, shares, strict=False))


def invert(shares: dict[int, float], point: float) -> int:
    total = 0.0
    for token, share in shares.items():
        total += share
        if point < total:
            return token
    return token


def sample(logits: torch.Tensor, asks: Sequence[SampleAt]) -> list[int]:
    return [sampled.token for sampled in SAMPLER.sample(logits, asks)]


def draw(logits: Sequence[float], sampling: Sampling, count: int) -> list[int]:
    rows = torch.tensor([list(logits)]).expand(count, -1).contiguous()
    return sample(rows, [SampleAt(sampling, i) for i in range(count)])


@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS)
def test_tokens_come_with_their_probability(sampling: Sampling) -> None:
    """Pearson's chi-square over all tokens of the support; fixed seeds, so it never flickers."""
    shares = distribution(LOGITS, sampling)
    drawn = draw(LOGITS, sampling, DRAWS)
    statistic = sum((drawn.count(t) - DRAWS * p) ** 2 / (DRAWS * p) for t, p in shares.items())
    freedom = torch.tensor((len(shares) - 1) / 2)
    assert torch.special.gammaincc(freedom, torch.tensor(statistic / 2)) > 0.01


@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS)
def test_support_is_exact(sampling: Sampling) -> None:
    shares = distribution(LOGITS, sampling)
    drawn = set(draw(LOGITS, sampling, DRAWS))
    assert drawn <= set(shares)
    assert drawn >= {t for t, p in shares.items() if p > 0.003}


@pytest.mark.parametrize("flat", [[1.0] * 7, [-2.0] * 7, [-0.0, 0.0] * 4], ids=["1", "-2", "0"])
@pytest.mark.parametrize("kept", [1, 2, 5])
def test_of_equal_logits_the_lowest_ids_are_kept(kept: int, flat: list[float]) -> None:
    assert set(draw(flat, Sampling(temperature=1.0, top_k=kept), 300)) == set(range(kept))
    by_mass = Sampling(temperature=1.0, top_p=(kept - 0.5) / len(flat))
    assert set(draw(flat, by_mass, 300)) == set(range(kept))


@pytest.mark.parametrize("temperature", [1e-3, 1e-7, 1e-50, 5e-324])
@pytest.mark.parametrize("cut", [{}, {"top_k": 1}, {"top_p": 0.5}], ids=str)
def test_next_to_no_temperature_is_greedy(temperature: float, cut: dict[str, float]) -> None:
    asks = [SampleAt(Sampling(temperature=temperature, seed=s, **cut), 0) for s in range(20)]
    assert set(sample(torch.tensor([LOGITS] * 20), asks)) == {LOGITS.index(max(LOGITS))}


def test_greedy_takes_the_lowest_id_of_the_best() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    assert sample(logits, [SampleAt(Sampling(), 0)] * 2) == [1, 0]


def test_nothing_to_sample_gives_nothing() -> None:
    assert sample(torch.empty(0, 8), []) == []


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.05, 0.7, 1.0, 3.0, 50.0]),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 40, 300, 999, 5000]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    seed=st.integers(-(2**63), 2**64),
)
asks = st.builds(SampleAt, samplings, st.integers(0, 2**20))


def batch(seed: int, rows: int, vocab: int) -> torch.Tensor:
    """Rounded to eighths, so that there are ties everywhere."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=generator) * 16).round() / 8


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 3),
    vocab=st.sampled_from([1, 63, 64, 65, 700, 1024]),
    width=st.integers(1, 30),
    seed=st.integers(0, 999),
    ruled_out=st.booleans(),
)
def test_the_best_tokens_come_by_logit_and_then_by_id(
    rows: int, vocab: int, width: int, seed: int, ruled_out: bool
) -> None:
    """Whether or not whole groups are passed over, and though most logits are equal."""
    logits = (batch(seed, rows, vocab) / 2).round()
    if ruled_out:
        logits[logits > -1] = float("-inf")
    width = min(width, vocab)
    for row, ids in zip(logits.tolist(), best(logits, width).tolist(), strict=True):
        assert ids == sorted(range(vocab), key=lambda i: (-row[i], i))[:width]


@settings(max_examples=60, deadline=None)
@given(st.lists(asks, min_size=1, max_size=8), st.integers(0, 999), st.sampled_from([3, 300, 3000]))
def test_a_row_does_not_depend_on_its_batch(some: list[SampleAt], seed: int, vocab: int) -> None:
    logits = batch(seed, len(some), vocab)
    together = sample(logits, some)
    assert together == [sample(logits[i : i + 1], [ask])[0] for i, ask in enumerate(some)]
    assert sample(logits.flip(0), some[::-1]) == together[::-1]


@settings(max_examples=60, deadline=None)
@given(st.lists(asks, min_size=1, max_size=4), st.integers(0, 999), st.sampled_from([2, 300, 9001]))
def test_tokens_are_the_inverse_of_the_cumulative_distribution(
    some: list[SampleAt], seed: int, vocab: int
) -> None:
    """However many tokens had to be ranked.  Within 1e-5 of a step either side will do."""
    logits = batch(seed, len(some), vocab)
    for row, ask, token in zip(logits.tolist(), some, sample(logits, some), strict=True):
        if ask.sampling.temperature == 0:
            assert token == row.index(max(row))
            continue
        shares = distribution(row, ask.sampling)
        point = uniform(ask.sampling.seed, ask.index)
        assert token in {invert(shares, point + d) for d in (-1e-5, 0.0, 1e-5)}


def test_the_number_of_a_position_is_the_same_everywhere_and_for_ever() -> None:
    assert uniform(0, 0) == 0.07067974193499926
    assert uniform(42, 7) == 0.8478960781842065


@given(st.integers(-(2**70), 2**70), st.integers(0, 2**40))
def test_numbers_lie_in_the_unit_interval_and_differ_by_seed_and_position(
    seed: int, index: int
) -> None:
    point = uniform(seed, index)
    assert 0.0 <= point < 1.0
    assert len({point, uniform(seed, index + 1), uniform(seed + 1, index)}) == 3
