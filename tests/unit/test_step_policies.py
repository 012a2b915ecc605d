"""What each policy makes of a load, as values, and what all of them must keep to."""

from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.spec import BatchSpec
from engine.policy.plan import LayerGroup
from engine.policy.policies.choose import POLICIES
from engine.policy.policies.layered import Layered
from engine.policy.policies.port import Load, Prompt, Share, StepPolicy
from engine.policy.policies.prefill_first import PrefillFirst
from engine.policy.policies.prepack import Prepack, first_fit_decreasing
from engine.policy.policies.sarathi import Sarathi
from engine.policy.policies.splitfuse import SplitFuse
from tests.property.paged_model import config

BUDGET, LAYERS = 16, 4
NAMES = list(POLICIES)


def policy(name: str) -> StepPolicy:
    return POLICIES[name](config(policy=name, chunk_tokens=BUDGET, layers=LAYERS))


def load(*tokens: int, decodes: int = 0, streak: int = 0) -> Load:
    return Load(decodes, tuple(Prompt(n) for n in tokens), streak)


def dealt(shares: tuple[Share, ...]) -> list[tuple[int, int]]:
    assert all(share.layers is None for share in shares)
    return [(share.prompt, share.tokens) for share in shares]


# ------------------------------------------------------------------------------------ all of them


def test_the_configuration_knows_every_policy_by_name() -> None:
    assert get_type_hints(BatchSpec)["policy"].__args__ == tuple(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_without_prompts_there_is_nothing_to_deal(name: str) -> None:
    assert policy(name).compose(load(decodes=3)) == ()


@pytest.mark.parametrize("name", NAMES)
@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=12),
    decodes=st.integers(0, 2 * BUDGET),
    arriving=st.integers(0, 40),
)
def test_the_oldest_prompt_gets_on_whatever_keeps_arriving(
    name: str, sizes: list[int], decodes: int, arriving: int
) -> None:
    """A clean deal in every step, and progress of the oldest within one pass of the layers."""
    made = policy(name)
    prompts = [Prompt(tokens) for tokens in sizes]
    streak = stuck = 0
    while prompts:
        shares = made.compose(Load(decodes, tuple(prompts), streak))
        check_deal(prompts, shares)
        stuck = 0 if 0 in {share.prompt for share in shares} else stuck + 1
        assert stuck <= LAYERS
        prompts = after(prompts, shares)
        streak = streak + 1 if shares else 0
        if arriving:
            arriving -= 1
            prompts.append(Prompt(3))


def check_deal(prompts: list[Prompt], shares: tuple[Share, ...]) -> None:
    assert len({share.prompt for share in shares}) == len(shares)
    for share in shares:
        prompt = prompts[share.prompt]
        assert 1 <= share.tokens <= prompt.tokens
        if share.layers is None:
            assert not prompt.passing
        else:
            assert share.layers.start == prompt.layers < share.layers.stop <= share.layers.of
            assert share.tokens == (prompt.passing or share.tokens)
    between = {i for i, prompt in enumerate(prompts) if prompt.passing}
    assert between <= {share.prompt for share in shares}, "left between two layers"


def after(prompts: list[Prompt], shares: tuple[Share, ...]) -> list[Prompt]:
    """The prompts once the step is done; finished ones are gone."""
    left = list(prompts)
    for share in shares:
        tokens = left[share.prompt].tokens
        if share.layers is None or share.layers.is_last:
            left[share.prompt] = Prompt(tokens - share.tokens)
        else:
            left[share.prompt] = Prompt(tokens, share.tokens, share.layers.stop)
    return [prompt for prompt in left if prompt.tokens]


# ----------------------------------------------------------------------------------------- sarathi


def test_sarathi_deals_what_decodes_leave_in_order_of_arrival() -> None:
    assert dealt(Sarathi(16).compose(load(10, 10, 10, decodes=4))) == [(0, 10), (1, 2)]


def test_sarathi_always_gives_prompts_one_token() -> None:
    assert dealt(Sarathi(16).compose(load(10, decodes=16))) == [(0, 1)]


# --------------------------------------------------------------------------------------- splitfuse


def test_splitfuse_makes_passes_of_equal_size() -> None:
    passes = []
    prompts = [Prompt(20), Prompt(6)]
    while prompts:
        shares = SplitFuse(16).compose(Load(2, tuple(prompts)))
        passes.append(sum(share.tokens for share in shares))
        prompts = after(prompts, shares)
    assert passes == [13, 13], "not 14 and 12"


def test_splitfuse_fills_passes_when_there_is_enough() -> None:
    assert dealt(SplitFuse(16).compose(load(20, 8, decodes=2))) == [(0, 14)]
    assert dealt(SplitFuse(16).compose(load(5, 6, 3, decodes=2))) == [(0, 5), (1, 6), (2, 3)]


# ----------------------------------------------------------------------------------- prefill_first


def test_prefill_first_never_splits_a_prompt_and_lets_decodes_wait() -> None:
    made = PrefillFirst(16)
    assert made.stalls_decodes
    assert dealt(made.compose(load(100, 3, decodes=4))) == [(0, 100)]
    assert dealt(made.compose(load(9, 7, 1, decodes=4))) == [(0, 9), (1, 7)]


def test_prefill_first_lets_decodes_through_when_its_patience_ends() -> None:
    made = PrefillFirst(16, patience=3)
    assert dealt(made.compose(load(5, decodes=1, streak=2))) == [(0, 5)]
    assert made.compose(load(5, decodes=1, streak=3)) == ()
    assert dealt(made.compose(load(5, decodes=0, streak=3))) == [(0, 5)]


# ----------------------------------------------------------------------------------------- prepack


def test_prepack_puts_whole_prompts_together_and_skips_what_does_not_fit() -> None:
    assert dealt(Prepack(16).compose(load(6, 11, 7, 5, decodes=1))) == [(0, 6), (2, 7)]
    assert dealt(Prepack(16).compose(load(11, 5, decodes=0))) == [(0, 11), (1, 5)]


def test_prepack_needs_fewer_steps_than_order_of_arrival_without_splitting() -> None:
    prompts = [Prompt(n) for n in (6, 11, 5, 10)]
    steps = 0
    while prompts:
        prompts = after(prompts, Prepack(16).compose(Load(0, tuple(prompts))))
        steps += 1
    assert steps == 2


def test_prepack_cuts_only_what_no_step_could_hold() -> None:
    assert dealt(Prepack(16).compose(load(40, 3, decodes=2))) == [(0, 14)]
    assert dealt(Prepack(16).compose(load(3, 40, decodes=2))) == [(0, 3)]


@given(sizes=st.lists(st.integers(1, 20), max_size=30))
def test_bins_hold_everything_once_and_no_two_could_be_one(sizes: list[int]) -> None:
    bins = first_fit_decreasing(sizes, 20)
    assert sorted(i for b in bins for i in b) == list(range(len(sizes)))
    fills = sorted(sum(sizes[i] for i in b) for b in bins)
    assert all(fill <= 20 for fill in fills)
    assert len(fills) < 2 or fills[0] + fills[1] > 20


# ----------------------------------------------------------------------------------------- layered


def test_layered_takes_a_long_prompt_through_as_many_layers_as_the_budget_pays_for() -> None:
    made = Layered(budget=16, layers=4)
    prompts = [Prompt(32)]
    depths = []
    while prompts:
        (share,) = made.compose(Load(0, tuple(prompts)))
        assert share.tokens == 32
        assert share.layers is not None
        depths.append((share.layers.start, share.layers.stop))
        prompts = after(prompts, (share,))
    assert depths == [(0, 2), (2, 4)]


def test_layered_lets_short_prompts_pass_all_layers_together() -> None:
    shares = Layered(16, 4).compose(load(5, 6, 20))
    assert shares == (
        Share(0, 5, LayerGroup(0, 4, 4)),
        Share(1, 6, LayerGroup(0, 4, 4)),
        Share(2, 20, LayerGroup(0, 1, 4)),
    )


def test_layered_goes_on_with_the_prompt_between_layers_first_and_always() -> None:
    prompts = (Prompt(9), Prompt(60, passing=60, layers=3))
    assert Layered(16, 4).compose(Load(16, prompts)) == (Share(1, 60, LayerGroup(3, 4, 4)),)


def test_layered_cuts_a_prompt_that_one_layer_a_step_could_not_carry() -> None:
    (share,) = Layered(16, 4).compose(load(1000))
    assert share == Share(0, 64, LayerGroup(0, 1, 4))
