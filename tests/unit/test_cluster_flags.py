"""Flags: one per setting of the spec, checked by the same code as a file."""

import argparse
from dataclasses import fields, is_dataclass, replace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from cluster import flags
from core.errors import ConfigError
from core.messages import Role
from core.spec import ClusterSpec, PoolSpec, to_mapping


def spec_of(*argv: str) -> ClusterSpec:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    flags.add_to(parser)
    return flags.to_spec(parser.parse_args(argv))


def leaves(node: object, prefix: str = "") -> set[str]:
    found: set[str] = set()
    for field in fields(node):  # type: ignore[arg-type]
        value, path = getattr(node, field.name), f"{prefix}{field.name}"
        found |= leaves(value, f"{path}.") if is_dataclass(value) else {path}
    return found


def test_no_flags_is_the_default_spec():
    assert spec_of() == ClusterSpec()


def test_every_setting_but_the_pools_has_a_flag_with_help():
    settings = list(flags.settings())

    assert {s.path for s in settings} == leaves(ClusterSpec()) - {"pools"}
    assert [s.path for s in settings if not s.doc] == []


@given(st.data())
def test_any_setting_given_as_a_flag_arrives(data):
    """Numbers and texts, which no other check constrains."""
    scalar = [s for s in flags.settings() if s.hint in (int, str) and s.path != "http.port"]
    setting = data.draw(st.sampled_from(scalar))
    value = data.draw(st.integers(1, 1000) if setting.hint is int else st.from_regex(r"\A\w+\Z"))

    got = to_mapping(spec_of(f"--{setting.path}={value}"))

    for name in setting.path.split("."):
        got = got[name]
    assert got == value


@pytest.mark.parametrize(
    ("argv", "pools"),
    [
        pytest.param(["--prefill", "2"], {Role.PREFILL: 2, Role.DECODE: 1}, id="prefill-alone"),
        pytest.param(["--decode", "3"], {Role.PREFILL: 1, Role.DECODE: 3}, id="decode-alone"),
        pytest.param(["--hybrid", "2"], {Role.HYBRID: 2}, id="hybrid-alone"),
        pytest.param(
            ["--prefill", "1", "--hybrid", "1"], {Role.PREFILL: 1, Role.HYBRID: 1}, id="mixed"
        ),
    ],
)
def test_worker_counts_make_the_pools(argv, pools):
    assert {p.role: p.replicas for p in spec_of(*argv).pools} == pools


def test_ranks_given_as_a_flag_are_those_of_every_pool(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("pools: [{role: prefill, tensor_parallel: 4}, {role: decode}]")

    spec = spec_of("--config", str(file), "--tensor-parallel", "2")

    assert spec.pools == (PoolSpec(Role.PREFILL, 1, 2), PoolSpec(Role.DECODE, 1, 2))


def test_flag_wins_over_file_and_file_over_default(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "kv": {"block_size": 32, "blocks": 9},
                "pools": [{"role": "hybrid", "replicas": 3}],
                "model": {"ref": "from-file"},
            }
        )
    )

    spec = spec_of("--config", str(file), "--kv.blocks", "5", "--model", "mine")

    assert (spec.kv.block_size, spec.kv.blocks, spec.model.ref) == (32, 5, "mine")
    assert spec.pools == (PoolSpec(Role.HYBRID, 3),)
    assert spec.batch == ClusterSpec().batch


def test_a_spec_written_to_a_file_comes_back(tmp_path):
    spec = replace(ClusterSpec(name="other"), pools=(PoolSpec(Role.HYBRID, 2),))
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(to_mapping(spec)))

    assert spec_of("--config", str(file)) == spec


def test_faults_are_given_as_yaml():
    (fault,) = spec_of(
        "--transport.faults", "[{on: data, action: corrupt, skip: 2}]"
    ).transport.faults

    assert (fault.on, fault.action, fault.skip) == ("data", "corrupt", 2)


@pytest.mark.parametrize(
    ("argv", "field"),
    [
        pytest.param(["--kv.block_size", "0"], "kv.block_size", id="too-small"),
        pytest.param(["--port", "70000"], "http.port", id="no-port"),
        pytest.param(["--transport.mover", "rdma"], "transport.mover", id="not-a-choice"),
        pytest.param(["--hybrid", "0"], "pools", id="no-workers"),
        pytest.param(["--prefill", "-1"], "pools[0].replicas", id="negative-workers"),
        pytest.param(["--tensor-parallel", "0"], "pools[0].tensor_parallel", id="no-ranks"),
        pytest.param(["--transport.faults", "[{onn: x}]"], "transport.faults[0].onn", id="nested"),
        pytest.param(["--transport.faults", "["], "config", id="bad-yaml"),
    ],
)
def test_a_bad_value_is_an_error_that_names_the_key(argv, field):
    with pytest.raises(ConfigError) as caught:
        spec_of(*argv)

    assert caught.value.field == field


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("kv: {blok_size: 3}", "did you mean block", id="unknown-key"),
        pytest.param("- 1", "expected settings by name, got list", id="not-a-mapping"),
        pytest.param("kv: [", "--config", id="not-yaml"),
        pytest.param("model: text", "model: expected a mapping", id="leaf-for-a-branch"),
    ],
)
def test_a_bad_file_is_an_error_that_says_what(tmp_path, text, said):
    file = tmp_path / "c.yaml"
    file.write_text(text)

    with pytest.raises(ConfigError, match=said):
        spec_of("--config", str(file), "--model.dtype", "float32")


def test_an_empty_file_is_the_default(tmp_path):
    (tmp_path / "c.yaml").write_text("")

    assert spec_of("--config", str(tmp_path / "c.yaml")) == ClusterSpec()


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match=r"no/such\.yaml"):
        spec_of("--config", "no/such.yaml")


def test_a_truth_value_is_true_or_false(capsys):
    assert spec_of("--transport.checksum", "false").transport.checksum is False
    with pytest.raises(SystemExit):
        spec_of("--transport.checksum", "maybe")
    assert "neither true nor false" in capsys.readouterr().err
