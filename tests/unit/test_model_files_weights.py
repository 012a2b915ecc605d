"""Weights: all that the model needs and nothing else, from one file or many; and their digest."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import ModelUnsupported
from engine.model.config_file import load_config
from engine.model.digest import model_digest
from engine.model.refs import ModelFiles, resolve
from engine.model.weights import load_weights
from tests.unit.model_files_help import saved, smollm, tiny_llama, write_gguf

SINGLE = "model.safetensors"


def load(files: ModelFiles, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return load_weights(files, load_config(files), dtype)


def edit(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(folder / SINGLE) | changes
    save_file({k: v for k, v in tensors.items() if v is not None}, folder / SINGLE)


def refusal(files: ModelFiles) -> str:
    with pytest.raises(ModelUnsupported) as caught:
        load(files)
    assert caught.value.field == "model.ref"
    return caught.value.message


@pytest.mark.parametrize("shard", ["1GB", "40KB"], ids=["single", "sharded"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_a_saved_model_loads_the_same_weights(tmp_path, shard, bias):
    model = tiny_llama(attention_bias=bias)
    files = saved(model, tmp_path, max_shard_size=shard)
    assert (tmp_path / SINGLE).exists() is (shard == "1GB")
    found, expected = load(files), model.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_weights_come_in_the_dtype_asked_for(tmp_path):
    model = tiny_llama()
    files = saved(model, tmp_path)
    for name, tensor in load(files, torch.bfloat16).items():
        assert torch.equal(tensor, model.state_dict()[name].to(torch.bfloat16)), name


def test_tied_embeddings_leave_the_head_out_even_if_it_is_stored(tmp_path):
    files = saved(tiny_llama(tie_word_embeddings=True), tmp_path)
    plain = load(files)
    assert "lm_head.weight" not in plain
    edit(tmp_path, {"lm_head.weight": plain["model.embed_tokens.weight"].clone()})
    assert load(files).keys() == plain.keys()


def test_stored_rotary_frequencies_are_no_weights(tmp_path):
    files = saved(tiny_llama(), tmp_path)
    plain = load(files)
    edit(tmp_path, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    assert load(files).keys() == plain.keys()


def test_a_missing_tensor_is_named(tmp_path):
    files = saved(tiny_llama(), tmp_path)
    edit(tmp_path, {"model.layers.1.mlp.up_proj.weight": None})
    assert "does not have model.layers.1.mlp.up_proj.weight;" in refusal(files)


def test_many_missing_tensors_are_counted(tmp_path):
    files = saved(tiny_llama(), tmp_path)
    save_file({"model.norm.weight": torch.ones(64)}, tmp_path / SINGLE)
    assert "and 15 more" in refusal(files)


def test_an_unexpected_tensor_is_named(tmp_path):
    files = saved(tiny_llama(), tmp_path)
    edit(tmp_path, {"model.layers.0.self_attn.q_norm.weight": torch.ones(16)})
    assert "has, unexpectedly, model.layers.0.self_attn.q_norm.weight;" in refusal(files)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path):
    files = saved(tiny_llama(), tmp_path)
    edit(tmp_path, {"model.norm.weight": torch.ones(32)})
    assert "model.norm.weight (32,), not (64,)" in refusal(files)


def test_a_missing_shard_is_named(tmp_path):
    files = saved(tiny_llama(), tmp_path, max_shard_size="40KB")
    lost = sorted(tmp_path.glob("model-*.safetensors"))[1]
    lost.unlink()
    assert f"{lost.name} are not there" in refusal(files)


def test_several_files_without_an_index_are_refused(tmp_path):
    files = saved(tiny_llama(), tmp_path)
    (tmp_path / SINGLE).rename(tmp_path / "a.safetensors")
    assert load(files)
    shutil.copy(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert "2 safetensors files" in refusal(files)


@pytest.mark.parametrize("kept", [0, 7, 100, 5000])
def test_a_damaged_file_is_named(tmp_path, kept):
    files = saved(tiny_llama(), tmp_path)
    (tmp_path / SINGLE).write_bytes((tmp_path / SINGLE).read_bytes()[:kept])
    assert f"{SINGLE} is damaged" in refusal(files)


# ------------------------------------------------------------------------------- digest


def test_the_digest_is_that_of_the_content_not_of_the_place(tmp_path):
    model = tiny_llama()
    first = model_digest(saved(model, tmp_path / "a"))
    assert len(bytes.fromhex(first)) == 16
    assert model_digest(saved(model, tmp_path / "b" / "other-name")) == first
    assert model_digest(saved(model, tmp_path / "c", max_shard_size="40KB")) == first


def test_the_digest_of_a_gguf_file_survives_a_copy(tmp_path):
    write_gguf(tmp_path / "a.gguf", tiny_llama())
    shutil.copy(tmp_path / "a.gguf", tmp_path / "renamed.gguf")
    a, b = (resolve(str(tmp_path / f"{n}.gguf")) for n in ("a", "renamed"))
    assert model_digest(a) == model_digest(b)


@pytest.mark.parametrize("row", [0, -1], ids=["first", "last"])
def test_the_digest_changes_with_any_tensor(tmp_path, row):
    files = saved(tiny_llama(), tmp_path)
    seen = {model_digest(files)}
    names = load_file(tmp_path / SINGLE)
    for name, tensor in names.items():
        changed = tensor.clone()
        changed[row] += 1
        edit(tmp_path, {name: changed})
        seen.add(model_digest(files))
    assert len(seen) == 1 + len(names)


def test_the_digest_changes_with_the_shape_but_not_with_stop_tokens(tmp_path):
    files = saved(tiny_llama(), tmp_path)
    first = model_digest(files)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))
    assert model_digest(files) == first
    raw["rope_parameters"]["rope_theta"] = 5e5
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert model_digest(files) != first


def test_the_digest_tells_quantisations_apart(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    digests = {model_digest(f) for f in (smollm(), resolve(str(tmp_path / "tiny.gguf")))}
    assert len(digests) == 2
    assert model_digest(smollm()) in digests
