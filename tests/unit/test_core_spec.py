"""Configuration: the round trip through plain data, and errors that name the key."""

from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ConfigError
from core.messages import Role
from core.spec import ClusterSpec, KVSpec, PoolSpec, from_mapping, to_mapping


def test_defaults_survive_the_round_trip() -> None:
    assert from_mapping(ClusterSpec, to_mapping(ClusterSpec())) == ClusterSpec()


@given(
    st.builds(
        ClusterSpec,
        pools=st.lists(
            st.builds(PoolSpec, st.sampled_from(Role), st.integers(1, 9)), min_size=1
        ).map(tuple),
        kv=st.builds(KVSpec, st.integers(1, 256), st.integers(0, 10**6), st.integers(1, 10**6)),
    )
)
def test_any_spec_survives_the_round_trip(spec: ClusterSpec) -> None:
    assert from_mapping(ClusterSpec, to_mapping(spec)) == spec


@pytest.mark.parametrize(
    ("raw", "field", "words"),
    [
        ({"kv": {"block_sze": 8}}, "kv.block_sze", "did you mean block_size"),
        ({"modle": {}}, "modle", "did you mean model"),
        ({"kv": {"zzz": 1}}, "kv.zzz", "known keys: block_size"),
        ({"kv": {"block_size": "8"}}, "kv.block_size", "expected int"),
        ({"kv": {"block_size": True}}, "kv.block_size", "expected int"),
        ({"kv": {"block_size": 0}}, "kv.block_size", "too small"),
        ({"kv": 3}, "kv", "expected a mapping"),
        ({"pools": {}}, "pools", "expected a list"),
        ({"pools": [{"role": "cook"}]}, "pools[0].role", "prefill, decode, hybrid"),
        ({"pools": [{"role": "decode", "replicas": 0}]}, "pools", "no workers"),
        ({"transport": {"mover": "pigeon"}}, "transport.mover", "auto, shm, tcp"),
        ({"transport": {"checksum": 1}}, "transport.checksum", "expected bool"),
        ({"http": {"port": 70000}}, "http.port", "not a port"),
        ({"timeouts": {"call_s": -1}}, "timeouts.call_s", "too small"),
    ],
    ids=lambda v: str(v)[:30],
)
def test_a_bad_setting_is_named(raw: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping(ClusterSpec, raw)
    assert caught.value.field == field
    assert words in caught.value.message


def test_an_int_is_a_float_but_not_the_other_way_round() -> None:
    assert from_mapping(ClusterSpec, {"timeouts": {"call_s": 2}}).timeouts.call_s == 2.0
    with pytest.raises(ConfigError):
        from_mapping(ClusterSpec, {"kv": {"block_size": 16.0}})


def test_every_setting_says_what_it_is_for() -> None:
    """`--help` is made from these words."""

    def undocumented(kind: type, path: str) -> list[str]:
        found = []
        for f in fields(kind):
            if isinstance(f.type, type) and is_dataclass(f.type):
                found += undocumented(f.type, f"{path}{f.name}.")
            elif kind is not ClusterSpec and not f.metadata.get("doc"):
                found.append(path + f.name)
        return found

    assert undocumented(ClusterSpec, "") == []
