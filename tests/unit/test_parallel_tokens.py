"""A model split over ranks says what it says whole: every family, in chunks and in batches."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from core.errors import InternalError, WorkerLost
from core.sampling import Sampling
from engine.model.build import build_decoder
from engine.model.config_file import load_config
from engine.model.ops import TorchOps
from engine.model.refs import resolve
from engine.model.weights import load_weights
from engine.parallel.gang import GangRunner, follow
from engine.parallel.wire import encode
from engine.policy.plan import LayerGroup, Plan
from tests import models
from tests.unit.gang_help import gang, groups
from tests.unit.llama_help import Bench, Running, random_tokens

FAMILIES = sorted(set(models.FAMILIES) - {"olmoe"})
SAMPLED = Sampling(temperature=1.0, seed=3, logprobs=3)
OUTPUT = 5
CHUNK = 9


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {family: models.make(family, root / family) for family in FAMILIES}


def bench(folder: Path) -> Bench:
    """Runs the whole model until its runner is replaced."""
    files = resolve(str(folder))
    config = load_config(files)
    weights = load_weights(files, config, torch.float32)
    return Bench(build_decoder(config, weights, TorchOps(torch.float32)))


def conversation(on: Bench) -> list[Running]:
    """Three prompts in one batch, by chunks, two of them greedy, one sampled."""
    all_of_it = [
        on.start(random_tokens(1, 1), name="one"),
        on.start(random_tokens(2, 16), name="block"),
        on.start(random_tokens(3, 40), SAMPLED, name="long"),
    ]
    for _ in range(40 // CHUNK + OUTPUT):
        on.step(all_of_it, CHUNK)
    return all_of_it


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_say_what_one_says(folders: dict[str, Path], family: str) -> None:
    whole, split = bench(folders[family]), bench(folders[family])
    with gang(folders[family], split.pool, 2) as split.runner:
        outputs = [running.output for running in conversation(split)]
    assert outputs == [running.output for running in conversation(whole)]
    assert torch.equal(split.pool.expert_counts, whole.pool.expert_counts)
    torch.testing.assert_close(split.pool.kv, whole.pool.kv, equal_nan=True, atol=1e-4, rtol=0)


def test_logprobs_are_those_of_the_whole_vocabulary(folders: dict[str, Path]) -> None:
    """97 words over two ranks: one has a word more."""
    whole, split = bench(folders["llama"]), bench(folders["llama"])
    work = whole.work(whole.start(random_tokens(5, 20), replace(SAMPLED, logprobs=97)), 1 << 20)
    (expected,) = whole.runner.run(Plan((work,)))
    with gang(folders["llama"], split.pool, 2) as runner:
        (got,) = runner.run(Plan((work,)))
    by_token = [sorted((t.token, t.logprob) for t in s.logprobs.top) for s in (got, expected)]
    torch.testing.assert_close(*map(torch.tensor, by_token), atol=1e-4, rtol=0)


def test_a_prompt_that_passes_the_layers_in_two_steps(folders: dict[str, Path]) -> None:
    whole, split = bench(folders["qwen3_moe"]), bench(folders["qwen3_moe"])
    prompt = random_tokens(6, 20)
    work = split.work(split.start(prompt), 1 << 20)
    first = replace(work, sample=None, layers=LayerGroup(0, 1, 3))
    with gang(folders["qwen3_moe"], split.pool, 2) as runner:
        assert runner.run(Plan((first,))) == [None]
        (got,) = runner.run(Plan((replace(work, layers=LayerGroup(1, 3, 3)),)))
    assert [got.token] == whole.generate(prompt, 1)


def test_sums_are_the_same_bits_on_every_rank() -> None:
    parts = torch.randn(3, 7, 11)
    with groups(3) as met, ThreadPoolExecutor(3) as ranks:
        sums = list(ranks.map(lambda g: g.all_reduce(parts[g.rank].clone()), met))
        gathered = list(ranks.map(lambda g: g.gather(parts[g.rank]), met))
    torch.testing.assert_close(sums[0], parts.sum(0))
    assert all(torch.equal(each, sums[0]) for each in sums)
    assert torch.equal(torch.stack(gathered[0]), parts)
    assert gathered[1:] == [[], []]


def test_a_lost_rank_ends_the_sums_of_the_others() -> None:
    with groups(2) as met:
        del met[1]
        with pytest.raises(WorkerLost, match="rank 0 of 2"):
            met[0].all_reduce(torch.ones(3))


def test_a_leader_that_fails_within_a_step_is_beyond_repair() -> None:
    def fail(plan: Plan) -> list[None]:
        raise RuntimeError("out of memory")

    sent: list[bytes] = []
    with pytest.raises(InternalError, match="out of memory"):
        GangRunner(SimpleNamespace(run=fail), sent.append).run(Plan())
    assert sent == [encode(Plan())]


def test_a_follower_ends_when_its_leader_is_gone() -> None:
    ran: list[Plan] = []
    bodies = iter([encode(Plan()), encode(Plan()), None])
    follow(SimpleNamespace(run=ran.append), lambda: next(bodies))
    assert ran == [Plan(), Plan()]
