"""What a format is called, and that stored matrices stand for what it promises."""

import io
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from rich.console import Console

from cluster.console import Steps
from cluster.serve import resolve_model
from core.errors import ConfigError
from core.spec import ClusterSpec, ModelSpec, PoolSpec, WeightsSpec
from engine.model.build import build_decoder
from engine.model.config_file import load_config
from engine.model.formats import WeightFormat, choose
from engine.model.ops import TorchOps
from engine.model.refs import ModelFiles, resolve
from engine.model.weight import Quantised, dense
from engine.model.weights import load_weights
from engine.reference import greedy
from tests.models import make, twin
from tests.models.gguf_files import write_gguf

MATRICES = ("_proj.weight", "embed_tokens.weight", "lm_head.weight")
Q4_1 = gguf.GGMLQuantizationType.Q4_1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """float32, tied embeddings."""
    return resolve(str(make("llama", tmp_path_factory.mktemp("hf"), tie_word_embeddings=True)))


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    into = tmp_path_factory.mktemp("bf16")
    twin("mixtral").to(torch.bfloat16).save_pretrained(into)
    return resolve(str(into))


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """A GGUF file of 4-bit matrices, interleaved q and k rows and stacked experts among them."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, twin("mixtral", hidden_size=64, intermediate_size=32), Q4_1)
    return resolve(str(path))


def named(
    files: ModelFiles, *pools: str, computes: str = "float32", **weights: Any
) -> list[WeightFormat]:
    """Of each pool.  weights: `weights` of the cluster."""
    spec = ClusterSpec(
        weights=WeightsSpec(**weights),
        pools=tuple(PoolSpec(weights=each) for each in pools),
    )
    return [choose(spec, i, computes, files) for i in range(len(pools))]


EXACT = WeightFormat("float32", "exact", "")
INT8 = WeightFormat("int8", "int8", "weights=int8")


def test_a_pool_has_its_own_format_or_the_clusters(folder: ModelFiles) -> None:
    assert named(folder, "", "auto", "int8") == [EXACT, EXACT, INT8]
    assert named(folder, "", "float32", dtype="int8") == [INT8, EXACT]


def test_the_codes_of_the_file_are_exact(quantised: ModelFiles) -> None:
    assert named(quantised, "gguf", "float32") == [WeightFormat("gguf", "exact", ""), EXACT]


def test_bfloat16_is_exact_where_the_file_has_it(folder: ModelFiles, bf16: ModelFiles) -> None:
    assert named(bf16, "bfloat16") == [WeightFormat("bfloat16", "exact", "")]
    (rounded,) = named(folder, "bfloat16")
    assert rounded == WeightFormat("bfloat16", "bfloat16", "weights=bfloat16")


def test_rounding_to_the_type_of_computation_is_part_of_it(folder: ModelFiles) -> None:
    assert named(folder, "", computes="bfloat16") == [WeightFormat("bfloat16", "bfloat16", "")]
    assert named(folder, "int8", computes="bfloat16") == [INT8]


def test_formats_that_share_kv_are_named_together_and_lossy(quantised: ModelFiles) -> None:
    one, two = named(quantised, "float32", "int8", share_kv=True)
    assert one.values == two.values == "shared(exact+int8)"
    assert one.lossy == two.lossy == "weights=shared(exact+int8)"


def test_sharing_kv_of_equal_values_changes_nothing(quantised: ModelFiles) -> None:
    pools = ("gguf", "float32")
    assert named(quantised, *pools, share_kv=True) == named(quantised, *pools)


def test_codes_of_a_file_without_codes_are_refused(folder: ModelFiles) -> None:
    with pytest.raises(ConfigError, match="gguf keeps the codes") as caught:
        named(folder, "gguf")
    assert caught.value.field == "weights.dtype"


def test_gguf_codes_stand_for_the_files_values(quantised: ModelFiles) -> None:
    config = load_config(quantised)
    plain = load_weights(quantised, config, torch.float32)
    kept = load_weights(quantised, config, torch.float32, "gguf")
    assert kept.keys() == plain.keys()
    for name, weight in kept.items():
        assert isinstance(weight, Quantised) == name.endswith(MATRICES), name
        assert torch.equal(dense(weight), dense(plain[name])), name


def test_bfloat16_matrices_of_a_gguf_file_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, twin("qwen3"), gguf.GGMLQuantizationType.BF16)
    files = resolve(str(path))
    config = load_config(files)
    plain = load_weights(files, config, torch.float32)
    kept = load_weights(files, config, torch.float32, "gguf")
    assert named(files, "bfloat16") == [WeightFormat("bfloat16", "exact", "")]
    assert dense(kept["lm_head.weight"]).dtype == torch.bfloat16
    assert all(torch.equal(dense(kept[n]).float(), dense(plain[n])) for n in plain)


@pytest.mark.parametrize("source", ["folder", "bf16", "quantised"])
def test_int8_rounds_matrices_and_leaves_norms_and_routers_alone(
    source: str, request: pytest.FixtureRequest
) -> None:
    files: ModelFiles = request.getfixturevalue(source)
    config = load_config(files)
    plain = load_weights(files, config, torch.float32)
    for name, weight in load_weights(files, config, torch.float32, "int8").items():
        values = dense(plain[name])
        if name.endswith(MATRICES):
            assert isinstance(weight, Quantised), name
            step = values.abs().amax(1, keepdim=True) / 127
            assert torch.all((weight.dense() - values).abs() <= step * 0.5001), name
        else:
            assert torch.equal(dense(weight), values), name


def test_bfloat16_storage_leaves_norms_and_routers_alone(quantised: ModelFiles) -> None:
    config = load_config(quantised)
    for name, weight in load_weights(quantised, config, torch.float32, "bfloat16").items():
        wanted = torch.bfloat16 if name.endswith(MATRICES) else torch.float32
        assert dense(weight).dtype == wanted, name


@pytest.mark.parametrize("source", ["folder", "quantised"])
def test_a_model_over_codes_gives_the_tokens_of_their_values(
    source: str, request: pytest.FixtureRequest
) -> None:
    """Embeddings included, tied (folder) or not."""
    files: ModelFiles = request.getfixturevalue(source)
    config, prompt = load_config(files), [3, 1, 4, 1, 5, 9, 2, 6]
    for storage in ("int8",) if source == "folder" else ("int8", "gguf"):
        codes = load_weights(files, config, torch.float32, storage)
        values = {name: dense(weight) for name, weight in codes.items()}
        both = [build_decoder(config, w, TorchOps(torch.float32)) for w in (codes, values)]
        one, two = (greedy(model, config, prompt, 12, ()) for model in both)
        assert one == two


def test_serve_refuses_a_format_the_model_has_not_before_anything_starts(
    folder: ModelFiles,
) -> None:
    spec = ClusterSpec(
        model=ModelSpec(ref=str(folder.path)),
        pools=(PoolSpec(), PoolSpec(weights="gguf")),
    )
    with Steps(Console(file=io.StringIO())) as steps, pytest.raises(ConfigError) as caught:
        resolve_model(spec, steps)
    assert caught.value.field == "weights.dtype"
