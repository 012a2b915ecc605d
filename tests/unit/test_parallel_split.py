"""Which sizes a model can be split into, and what each rank gets of every matrix."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ConfigError
from engine.model.config import ModelConfig, Moe, Rope
from engine.model.config_file import load_config
from engine.model.quantise import int8
from engine.model.refs import resolve
from engine.model.weight import Quantised, dense
from engine.model.weights import load_weights
from engine.parallel.shard import columns, shard_weights
from engine.parallel.split import check_size, config_of_rank, part, working_sizes
from tests import models

FIELD = "pools[1].tensor_parallel"


def config(heads: int, kv_heads: int, intermediate: int, moe: Moe | None = None) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        name="some-model",
        layers=2,
        hidden=48,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=16,
        vocab_size=97,
        max_len=64,
        rope=Rope(),
        local_rope=Rope(),
        norm_eps=1e-5,
        tied_embeddings=True,
        bos_id=0,
        eos_ids=(1,),
        windows=(0, 0),
        scale=0.25,
        moe=moe,
    )


@pytest.mark.parametrize(
    ("given_config", "sizes"),
    [
        pytest.param(config(8, 4, 96), (1, 2, 4), id="heads"),
        pytest.param(config(9, 3, 1536), (1, 3), id="smollm2"),
        pytest.param(config(8, 4, 98), (1, 2), id="neurons"),
        pytest.param(config(8, 4, 7, Moe(4, 2, 12, True, 6)), (1, 2), id="shared-expert"),
        pytest.param(config(8, 4, 7, Moe(4, 2, 12, True)), (1, 2, 4), id="no-dense-layer"),
        pytest.param(
            config(8, 4, 7, Moe(4, 2, 12, True, dense_layers=frozenset({0}))),
            (1,),
            id="dense-layer",
        ),
        pytest.param(replace(config(8, 4, 96), qk_norm="all"), (1,), id="norm-over-all-heads"),
    ],
)
def test_a_size_that_does_not_work_is_refused_with_those_that_do(
    given_config: ModelConfig, sizes: tuple[int, ...]
) -> None:
    assert working_sizes(given_config) == sizes
    for size in range(1, 12):
        if size in sizes:
            check_size(given_config, size, FIELD)
            continue
        with pytest.raises(ConfigError) as caught:
            check_size(given_config, size, FIELD)
        assert caught.value.field == FIELD
        assert f"{FIELD}: some-model cannot be split into {size} ranks" in caught.value.message
        assert caught.value.message.endswith(f"work: {', '.join(map(str, sizes))}")


@given(st.integers(0, 500), st.integers(1, 9))
def test_parts_cover_everything_once_and_differ_by_one_at_most(total: int, size: int) -> None:
    parts = [part(total, rank, size) for rank in range(size)]
    assert [i for p in parts for i in range(p.start, p.stop)] == list(range(total))
    lengths = {p.stop - p.start for p in parts}
    assert max(lengths) - min(lengths) <= 1


def quantised(bits: int, group: int, mins: bool) -> Quantised:
    rows, width = 6, 192
    codes = torch.randint(0, 16 if bits == 4 else 100, (rows, width * bits // 8))
    scales = torch.rand(rows, width // group)
    kind = torch.uint8 if bits == 4 else torch.int8
    return Quantised(codes.to(kind), scales, -scales if mins else None, bits, group)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [16, 32, 192])
@pytest.mark.parametrize("mins", [False, True], ids=["symmetric", "mins"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_codes_of_some_columns_stand_for_the_values_of_these_columns(
    bits: int, group: int, mins: bool, size: int
) -> None:
    whole = quantised(bits, group, mins)
    for rank in range(size):
        which = part(192, rank, size)
        cut = columns(whole, which)
        assert torch.equal(dense(cut), whole.dense()[:, which])
        finest = isinstance(cut, Quantised)
        assert finest == (which.start % 16 == 0 and which.stop % 16 == 0)


@pytest.mark.parametrize("family", sorted(set(models.FAMILIES) - {"olmoe"}))
@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_what_the_ranks_have_makes_up_the_whole(family: str, kind: str, tmp_path: Path) -> None:
    """Row parts stacked, column parts side by side, the rest the same on every rank; all of the
    shapes that the rank's own configuration has."""
    files = resolve(str(models.make(family, tmp_path)))
    whole_config = load_config(files)

    def load() -> dict:
        weights = load_weights(files, whole_config, torch.float32)
        matrices = {n: w for n, w in weights.items() if kind == "int8" and w.dim() == 2}
        return weights | {name: int8(w) for name, w in matrices.items()}

    whole = load()
    whole.setdefault("lm_head.weight", whole["model.embed_tokens.weight"])
    shards = [shard_weights(load(), rank, 2) for rank in range(2)]
    own = config_of_rank(whole_config, 2)
    assert shards[0].keys() == whole.keys()
    assert shards[0].keys() - shards[1].keys() == {n for n in whole if n.endswith("o_proj.bias")}
    for name, weight in whole.items():
        parts = [dense(shard[name]) for shard in shards if name in shard]
        assert torch.equal(joined(name, parts), dense(weight)), name
    queries = shards[1]["model.layers.0.self_attn.q_proj.weight"]
    assert queries.shape[0] == own.heads * own.head_dim


def joined(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    module, kind = name.split(".")[-2:]
    if module == "gate_up_proj":
        gates, ups = zip(*(each.chunk(2) for each in parts), strict=True)
        return torch.cat((*gates, *ups))
    if module in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"):
        return torch.cat(parts)
    if module in ("o_proj", "down_proj") and kind == "weight":
        return torch.cat(parts, dim=1)
    assert all(torch.equal(each, parts[0]) for each in parts)
    return parts[0]
