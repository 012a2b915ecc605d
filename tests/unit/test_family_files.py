"""Every family has the same weights and shape from each way of storing it."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import ModelUnsupported
from engine.model.config import ModelConfig, Rope
from engine.model.config_file import load_config
from engine.model.refs import ModelFiles, resolve
from engine.model.rope import frequencies
from engine.model.weight import Quantised, dense
from engine.model.weights import expected_shapes, load_weights
from tests.models import FAMILIES, make, twin
from tests.models.gguf_files import write_gguf

families = pytest.mark.parametrize("family", FAMILIES)
sparse = pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"])
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "mixtral": {"sliding_window": 12},
    "qwen2_moe": {"mlp_only_layers": []},
}
"""What llama.cpp knows besides, or does not know."""


def load(files: ModelFiles) -> dict[str, torch.Tensor]:
    return load_weights(files, load_config(files), torch.float32)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def metadata(family: str) -> dict[str, Any]:
    """What llama.cpp writes for Qwen's experts besides."""
    name = {"qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}.get(family)
    return {f"{name}.expert_feed_forward_length": 32} if name else {}


@families
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_gguf_file_holds_what_the_folder_holds(family: str, kind: str, tmp_path: Path) -> None:
    model = twin(family, **SHAPES.get(family, {}))
    model.save_pretrained(tmp_path / "folder")
    path = tmp_path / "m.gguf"
    stands_for = write_gguf(path, model, gguf.GGMLQuantizationType[kind], metadata(family))
    assert_same(load(resolve(str(path))), stands_for)
    if kind == "F32":
        assert_same(load(resolve(str(tmp_path / "folder"))), stands_for)


@families
def test_codes_kept_as_in_the_file_stand_for_the_same_weights(family: str, tmp_path: Path) -> None:
    path, kind = tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q8_0
    model = twin(family, **SHAPES.get(family, {}))
    stands_for = write_gguf(path, model, kind, metadata(family))
    files = resolve(str(path))
    kept = load_weights(files, load_config(files), torch.float32, "gguf")
    assert any(isinstance(weight, Quantised) for weight in kept.values())
    assert_same({name: dense(weight) for name, weight in kept.items()}, stands_for)


@families
def test_both_formats_give_the_same_shape(family: str, tmp_path: Path) -> None:
    model = twin(family, **SHAPES.get(family, {}))
    model.save_pretrained(tmp_path / "folder")
    write_gguf(tmp_path / "m.gguf", model, metadata=metadata(family))
    here, there = (load_config(resolve(str(tmp_path / n))) for n in ("folder", "m.gguf"))
    assert there.norm_eps == pytest.approx(here.norm_eps)
    assert differing(here, there) <= {"name", "norm_eps", "bos_id", "eos_ids"}


def differing(a: ModelConfig, b: ModelConfig) -> set[str]:
    return {f.name for f in fields(a) if getattr(a, f.name) != getattr(b, f.name)}


@families
def test_the_shapes_expected_are_those_of_the_weights(family: str, tmp_path: Path) -> None:
    files = resolve(str(make(family, tmp_path)))
    shapes = {name: tuple(tensor.shape) for name, tensor in load(files).items()}
    assert shapes == expected_shapes(load_config(files))


# --------------------------------------------------------------------------------- experts


@sparse
def test_experts_in_stacks_are_those_saved_one_by_one(family: str, tmp_path: Path) -> None:
    """Stacks are what transformers holds in memory; it saves single experts."""
    make(family, tmp_path)
    apart = load(resolve(str(tmp_path)))
    held = {name: tensor.clone() for name, tensor in twin(family).state_dict().items()}
    assert any(tensor.ndim == 3 for tensor in held.values())
    save_file(held, tmp_path / "model.safetensors")
    assert_same(load(resolve(str(tmp_path))), apart)


def test_an_expert_without_its_half_is_named(tmp_path: Path) -> None:
    make("qwen3_moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelUnsupported) as caught:
        load(resolve(str(tmp_path)))
    assert "not have model.layers.1.mlp.experts.3.gate_up_proj.weight;" in caught.value.message


def test_an_expert_too_many_is_named(tmp_path: Path) -> None:
    make("mixtral", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.block_sparse_moe.experts.6.w2.weight"] = torch.ones(64, 32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelUnsupported, match=r"unexpectedly, .*experts\.6\.down_proj"):
        load(resolve(str(tmp_path)))


def test_a_stack_of_too_few_experts_is_refused(tmp_path: Path) -> None:
    make("mixtral", tmp_path)
    held = {name: tensor.clone() for name, tensor in twin("mixtral").state_dict().items()}
    name = "model.layers.2.mlp.experts.down_proj"
    held[name] = held[name][:-1].clone()
    save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(ModelUnsupported, match=r"layers\.2\.mlp\.experts\.0\.down_proj"):
        load(resolve(str(tmp_path)))


# ---------------------------------------------------------------------- rotary embeddings


def test_the_table_of_a_gguf_file_stretches_frequencies_as_llama3_does(tmp_path: Path) -> None:
    """`rope_freqs.weight` as llama.cpp's converter computes it, in its own words."""
    llama3 = Rope(5e5, "llama3", factor=8.0, low_freq=1.0, high_freq=4.0, original_len=64)
    plain = frequencies(Rope(5e5), 16)
    turns = 64 * plain / (2 * torch.pi)
    smooth = (turns - 1.0) / 3.0
    between = 1 / ((1 - smooth) / 8.0 + smooth)
    divisors = torch.where(turns > 4.0, 1.0, torch.where(turns < 1.0, 8.0, between))
    assert len(set(divisors.tolist())) > 2
    model = twin("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    path = tmp_path / "m.gguf"
    expected = write_gguf(path, model, tensors={"rope_freqs.weight": divisors.numpy()})
    files = resolve(str(path))
    rope = load_config(files).rope
    torch.testing.assert_close(frequencies(rope, 16), frequencies(llama3, 16))
    assert_same(load(files), expected)


@pytest.mark.parametrize(
    "table",
    [np.ones(7, np.float32), np.ones(8, np.float16)],
    ids=["too-short", "other-type"],
)
def test_a_table_that_does_not_fit_is_refused(tmp_path: Path, table: np.ndarray) -> None:
    write_gguf(tmp_path / "m.gguf", twin("llama"), tensors={"rope_freqs.weight": table})
    with pytest.raises(ModelUnsupported, match=r"rope_freqs\.weight does not hold 8 floats"):
        load_config(resolve(str(tmp_path / "m.gguf")))


def test_linear_scaling_is_the_same_in_both_formats(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    model = twin("llama", rope_parameters=rope)
    model.save_pretrained(tmp_path / "folder")
    write_gguf(tmp_path / "m.gguf", model)
    here, there = (load_config(resolve(str(tmp_path / n))) for n in ("folder", "m.gguf"))
    assert here.rope == there.rope == Rope(10000.0, "linear", 4.0)
