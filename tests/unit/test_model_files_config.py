"""A model's shape is read alike from config.json and from GGUF, or refused by name."""

import json

import pytest

from core.errors import ModelUnsupported
from engine.model import families
from engine.model.config import ModelConfig, Rope
from engine.model.config_file import load_config
from engine.model.gguf_header import read_header
from engine.model.refs import resolve
from tests.unit.model_files_help import saved, smollm, tiny_llama, write_gguf

RAW = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
}
SMOLLM = ModelConfig(
    architecture="llama",
    name="SmolLM2-135M-Instruct",
    layers=30,
    hidden=576,
    intermediate=1536,
    heads=9,
    kv_heads=3,
    head_dim=64,
    vocab_size=49152,
    max_len=8192,
    rope=Rope(100000.0),
    local_rope=Rope(100000.0),
    norm_eps=1e-5,
    tied_embeddings=True,
    bos_id=1,
    eos_ids=(2,),
    windows=(0,) * 30,
    scale=0.125,
)


def without(key):
    return {k: v for k, v in RAW.items() if k != key}


def test_config_json_gives_the_shape():
    assert families.from_hf(RAW, "SmolLM2-135M-Instruct") == SMOLLM


def test_rope_theta_is_found_where_transformers_5_writes_it():
    raw = without("rope_theta") | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    assert families.from_hf(raw).rope.theta == 5e5


def test_absent_keys_take_the_defaults_of_transformers():
    keys = ("num_key_value_heads", "rope_theta", "rms_norm_eps", "tie_word_embeddings")
    config = families.from_hf({k: v for k, v in RAW.items() if k not in keys})
    found = (config.kv_heads, config.rope.theta, config.norm_eps, config.tied_embeddings)
    assert found == (9, 10000.0, 1e-6, False)


def test_several_eos_ids_and_biases_are_kept():
    config = families.from_hf(RAW | {"eos_token_id": [7, 2], "attention_bias": True})
    assert (config.eos_ids, config.qkv_bias, config.out_bias) == ((2, 7), True, True)
    assert families.from_hf(without("eos_token_id")).eos_ids == ()


def test_explicit_nulls_are_as_good_as_absent_keys():
    keys = ("num_key_value_heads", "head_dim", "rope_scaling", "rope_parameters", "hidden_act")
    config = families.from_hf(RAW | dict.fromkeys(keys))
    assert (config.kv_heads, config.head_dim, config.rope) == (9, 64, Rope(100000.0))


@pytest.mark.parametrize(
    ("settings", "rope"),
    [
        pytest.param(
            {"type": "linear", "factor": 2}, Rope(1e5, "linear", 2.0), id="old-name-of-type"
        ),
        pytest.param(
            {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 512,
            },
            Rope(1e5, "llama3", 32.0, 1.0, 4.0, 512),
            id="llama3",
        ),
        pytest.param(
            {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 2},
            Rope(1e5, "llama3", 8.0, 1.0, 2.0, 8192),
            id="llama3-trained-on-its-whole-length",
        ),
    ],
)
def test_rope_scaling_is_read_where_transformers_4_wrote_it(settings, rope):
    assert families.from_hf(RAW | {"rope_scaling": settings}).rope == rope


@pytest.mark.parametrize(
    ("change", "names"),
    [
        pytest.param({"rope_scaling": {"rope_type": "llama3"}}, "lacks 'factor'", id="rope-part"),
        pytest.param({"rope_parameters": {"rope_type": "yarn"}}, "'yarn'", id="rope"),
        pytest.param({"hidden_act": "gelu"}, "'gelu'", id="activation"),
        pytest.param({"mlp_bias": True}, "biases in the MLP", id="mlp-bias"),
        pytest.param({"partial_rotary_factor": 0.5}, "partial rotary", id="partial"),
        pytest.param({"quantization_config": {"quant_method": "gptq"}}, "quantised", id="gptq"),
        pytest.param({"hidden_size": None}, "hidden_size = None", id="no-size"),
        pytest.param({"num_attention_heads": 0}, "num_attention_heads = 0", id="zero-size"),
    ],
)
def test_what_is_not_supported_is_named(change, names):
    with pytest.raises(ModelUnsupported) as caught:
        families.from_hf(RAW | change, "some-model")
    assert names in caught.value.message
    assert "some-model" in caught.value.message


@pytest.mark.parametrize("kind", ["phi3", "gemma3", None])
def test_an_unknown_architecture_is_named_beside_those_that_are_supported(kind):
    with pytest.raises(ModelUnsupported) as caught:
        families.from_hf(RAW | {"model_type": kind}, "some-model")
    assert f"architecture {kind!r}" in caught.value.message
    assert (
        "one of: gemma3_text, llama, mistral, mixtral, olmoe, qwen2, qwen2_moe, qwen3, qwen3_moe"
        in caught.value.message
    )


def test_the_default_model_has_the_shape_of_its_paper():
    config = load_config(smollm())
    assert config.norm_eps == pytest.approx(1e-5)
    assert config.eos_ids == (0, 2)
    assert {
        f: getattr(config, f) for f in SMOLLM.__slots__ if f not in ("norm_eps", "eos_ids")
    } == {f: getattr(SMOLLM, f) for f in SMOLLM.__slots__ if f not in ("norm_eps", "eos_ids")}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_a_model_has_the_same_shape_in_both_formats(tmp_path, tied, bias):
    model = tiny_llama(tie_word_embeddings=tied, attention_bias=bias)
    write_gguf(tmp_path / "tiny.gguf", model)
    there = load_config(resolve(str(tmp_path / "tiny.gguf")))
    here = load_config(saved(model, tmp_path / "tiny"))
    assert there.norm_eps == pytest.approx(here.norm_eps)
    assert here.tied_embeddings is tied
    assert here.qkv_bias is bias
    fields = [f for f in here.__slots__ if f != "norm_eps"]
    assert [getattr(there, f) for f in fields] == [getattr(here, f) for f in fields]


@pytest.mark.parametrize(
    ("metadata", "names"),
    [
        pytest.param({"general.architecture": "phi3"}, "'phi3'", id="architecture"),
        pytest.param({"general.architecture": "phi3"}, "one of: gemma3, llama", id="supported"),
        pytest.param({"llama.rope.scaling.type": "yarn"}, "'yarn'", id="rope"),
        pytest.param(
            {"llama.expert_count": 8, "llama.expert_used_count": 2},
            "no tensor blk.0.ffn_gate_exps.weight",
            id="experts-one-by-one",
        ),
        pytest.param({"llama.attention.clamp_kqv": 8.0}, "clipped queries", id="clipped"),
        pytest.param({"llama.final_logit_softcapping": 30.0}, "soft-capped", id="soft-capped"),
        pytest.param({"llama.rope.dimension_count": 8}, "sizes [8, 16]", id="partial-rotary"),
        pytest.param(
            {"llama.rope.dimension_count": 8, "llama.attention.key_length": None},
            "sizes [8, 16]",
            id="partial-rotary-of-implied-heads",
        ),
        pytest.param(
            {"llama.attention.head_count_kv": [2, 1]}, "head_count_kv = [2, 1]", id="kv-per-layer"
        ),
        pytest.param({"llama.attention.value_length": 32}, "sizes [16, 32]", id="value-heads"),
        pytest.param({"split.count": 3}, "in other files", id="split"),
        pytest.param({"llama.block_count": None}, "block_count = None", id="no-size"),
    ],
)
def test_an_unsupported_gguf_model_is_named(tmp_path, metadata, names):
    write_gguf(tmp_path / "odd.gguf", tiny_llama(), metadata=metadata)
    with pytest.raises(ModelUnsupported) as caught:
        families.from_gguf(read_header(tmp_path / "odd.gguf"), "odd")
    assert names in caught.value.message


# ------------------------------------------------------------------- end-of-answer tokens


def test_gguf_special_tokens_that_end_a_chat_end_an_answer(tmp_path):
    metadata = {"tokenizer.ggml.eos_token_id": 3, "tokenizer.ggml.eot_token_id": 5}
    write_gguf(tmp_path / "m.gguf", tiny_llama(), metadata=metadata)
    assert load_config(resolve(str(tmp_path / "m.gguf"))).eos_ids == (3, 5, 95)
    plain = {"tokenizer.ggml.token_type": [1] * 96}
    write_gguf(tmp_path / "n.gguf", tiny_llama(), metadata=plain | metadata)
    assert load_config(resolve(str(tmp_path / "n.gguf"))).eos_ids == (3, 5)


def test_generation_config_has_the_last_word_on_eos(tmp_path):
    files = saved(tiny_llama(), tmp_path)
    settings = {
        "eos_token": {"content": "</s>"},
        "added_tokens_decoder": {
            "11": {"content": "<|eot_id|>", "special": True},
            "12": {"content": "</s>", "special": True},
            "13": {"content": "<|im_end|>", "special": False},
            "14": {"content": "<|tool|>", "special": True},
        },
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 4]}))
    assert load_config(files).eos_ids == (4, 9)
    (tmp_path / "generation_config.json").unlink()
    assert load_config(files).eos_ids == (11, 12, 95)


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_damaged_config_is_refused(tmp_path, text):
    files = saved(tiny_llama(), tmp_path)
    (tmp_path / "config.json").write_text(text, "latin-1")
    with pytest.raises(ModelUnsupported, match=r"config\.json"):
        load_config(files)
