"""What each family's config.json means where it says little, and what is refused by name."""

from typing import Any

import pytest

from core.errors import ModelUnsupported
from engine.model import families
from engine.model.config import Moe, Rope

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 97,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 48}


def config(family: str, **raw: Any) -> Any:
    return families.from_hf({**SMALL, "model_type": family, **raw}, "some-model")


def refusal(family: str, **raw: Any) -> str:
    with pytest.raises(ModelUnsupported) as caught:
        config(family, **raw)
    assert caught.value.field == "model.ref"
    assert "some-model" in caught.value.message
    return caught.value.message


def test_mistral_has_a_window_unless_its_file_says_none() -> None:
    assert config("mistral").windows == (4096,) * 4
    assert config("mistral", sliding_window=None).windows == (0,) * 4
    assert config("mistral", sliding_window=7).windows == (7,) * 4


def test_the_keys_that_are_absent_take_each_family_s_own_defaults() -> None:
    assert config("mixtral", **EXPERTS).rope == Rope(1e6)
    assert config("mixtral", **EXPERTS).norm_eps == 1e-5
    assert config("qwen3").head_dim == 128
    assert config("gemma3_text").tied_embeddings
    assert not config("gemma3_text", tie_word_embeddings=False).tied_embeddings
    assert config("gemma3_text").scale == 1 / 16
    assert config("olmoe", **EXPERTS).max_len == 4096


def test_qwen_has_windows_only_if_they_are_switched_on_and_only_above() -> None:
    some = {"sliding_window": 9, "max_window_layers": 1}
    assert config("qwen2", **some).windows == (0,) * 4
    assert config("qwen2", use_sliding_window=True, **some).windows == (0, 9, 9, 9)
    types = ["sliding_attention", *["full_attention"] * 3]
    listed = config("qwen3", use_sliding_window=True, layer_types=types, **some)
    assert listed.windows == (9, 0, 0, 0)
    moe = config("qwen2_moe", use_sliding_window=True, sliding_window=9, **SHARED)
    assert moe.windows == (9, 0, 9, 0)
    assert config("qwen3_moe", use_sliding_window=True, sliding_window=9, **EXPERTS).windows[0] == 9


def test_gemma_sees_everything_in_every_sixth_layer_only() -> None:
    found = config("gemma3_text", num_hidden_layers=7, sliding_window=5)
    assert found.windows == (5, 5, 5, 5, 5, 0, 5)
    assert config("gemma3_text", sliding_window_pattern=2, sliding_window=5).windows == (5, 0, 5, 0)
    assert (found.rope, found.local_rope) == (Rope(1e6), Rope(1e4))
    assert found.embedding_scale == 8.0


def test_gemma_stretches_only_the_layers_that_see_everything() -> None:
    old = {"rope_theta": 1e5, "rope_local_base_freq": 500.0}
    found = config("gemma3_text", rope_scaling={"rope_type": "linear", "factor": 8.0}, **old)
    assert (found.rope, found.local_rope) == (Rope(1e5, "linear", 8.0), Rope(500.0))


def test_layers_with_experts_are_those_the_file_does_not_leave_out() -> None:
    every = config("qwen2_moe", **SHARED)
    assert every.moe == Moe(8, 2, 32, normalise=False, shared_intermediate=48)
    assert every.moe_layers == (0, 1, 2, 3)
    assert config("qwen3_moe", decoder_sparse_step=2, **EXPERTS).moe_layers == (1, 3)
    assert config("qwen3_moe", mlp_only_layers=[0, 3], **EXPERTS).moe_layers == (1, 2)
    assert config("llama").moe_layers == ()


def test_the_number_of_experts_has_two_names() -> None:
    renamed = {"num_local_experts" if k == "num_experts" else k: v for k, v in EXPERTS.items()}
    for family in ("mixtral", "qwen3_moe", "olmoe"):
        assert config(family, **EXPERTS).moe == config(family, **renamed).moe


def test_shares_sum_to_one_where_the_family_or_its_file_says_so() -> None:
    said = {f: config(f, **SHARED).moe.normalise for f in ("mixtral", "qwen2_moe", "olmoe")}
    assert said == {"mixtral": True, "qwen2_moe": False, "olmoe": False}
    assert config("olmoe", norm_topk_prob=True, **EXPERTS).moe.normalise


@pytest.mark.parametrize(
    ("family", "raw", "names"),
    [
        pytest.param("olmoe", EXPERTS | {"clip_qkv": 8.0}, "clipped queries", id="olmoe-clip"),
        pytest.param(
            "mixtral", EXPERTS | {"num_experts_per_tok": 9}, "9 experts per token of 8", id="top-k"
        ),
        pytest.param(
            "qwen3_moe", {"moe_intermediate_size": 32}, "num_experts = None", id="no-experts"
        ),
        pytest.param("qwen2_moe", EXPERTS, "shared_expert_intermediate_size", id="shared-unstated"),
        pytest.param(
            "gemma3_text", {"final_logit_softcapping": 30.0}, "soft-capped", id="gemma-final-cap"
        ),
        pytest.param(
            "gemma3_text", {"attn_logit_softcapping": 50.0}, "soft-capped", id="gemma-attn-cap"
        ),
        pytest.param(
            "gemma3_text", {"use_bidirectional_attention": True}, "both directions", id="gemma-both"
        ),
        pytest.param(
            "gemma3_text", {"hidden_activation": "gelu"}, "activation 'gelu'", id="gemma-activation"
        ),
        pytest.param(
            "qwen3",
            {"use_sliding_window": True, "layer_types": ["chunked_attention"] * 4},
            "layers of type chunked_attention",
            id="layer-type",
        ),
        pytest.param(
            "gemma3_text",
            {"layer_types": ["full_attention"]},
            "types for 1 of 4 layers",
            id="layer-types",
        ),
        pytest.param("qwen2", {"rope_scaling": {"type": "yarn"}}, "'yarn'", id="yarn"),
    ],
)
def test_an_unsupported_feature_of_a_family_is_named(
    family: str, raw: dict[str, Any], names: str
) -> None:
    assert names in refusal(family, **raw)
