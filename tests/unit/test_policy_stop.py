"""When a generation ends, and of what."""

import pytest

from core.messages import FinishReason
from core.sampling import Sampling
from engine.policy.stop import StopRules

RULES = StopRules(eos_ids=frozenset({2}), max_len=100)
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("sampling", "token", "index", "length", "expected"),
    [
        (Sampling(max_tokens=9), 5, 0, 10, None),
        (Sampling(max_tokens=9), 2, 0, 10, STOP),
        (Sampling(max_tokens=9, ignore_eos=True), 2, 0, 10, None),
        (Sampling(max_tokens=9, stop_token_ids=(5,)), 5, 0, 10, STOP),
        (Sampling(max_tokens=9, stop_token_ids=(2,), ignore_eos=True), 2, 0, 10, STOP),
        (Sampling(max_tokens=9), 5, 7, 10, None),
        (Sampling(max_tokens=9), 5, 8, 10, LENGTH),
        (Sampling(max_tokens=9), 5, 0, 99, None),
        (Sampling(max_tokens=9), 5, 0, 100, LENGTH),
        (Sampling(max_tokens=1), 2, 0, 100, STOP),
        (Sampling(max_tokens=9, min_tokens=5), 2, 0, 10, STOP),
    ],
    ids=[
        "goes-on",
        "eos",
        "eos-ignored",
        "stop-token",
        "asked-stop-token-although-eos-ignored",
        "one-before-max-tokens",
        "max-tokens",
        "one-before-max-len",
        "max-len",
        "stop-wins-over-length",
        "an-end-that-a-grammar-forced-before-min-tokens",
    ],
)
def test_finish(
    sampling: Sampling, token: int, index: int, length: int, expected: FinishReason | None
) -> None:
    assert RULES.finish(sampling, token, index, length) is expected
