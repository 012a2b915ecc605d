"""GGUF files: our header parser against the `gguf` package's, and every damage refused."""

import contextlib
from pathlib import Path

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.integrations.gguf.dequant import GGML_BLOCK, dequantize
from transformers.integrations.gguf.reader import GgufHeader, load_gguf_state_dict
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

from core.errors import ModelUnsupported
from engine.model.config_file import load_config
from engine.model.families import FAMILIES
from engine.model.gguf_file import hf_name
from engine.model.gguf_header import read_header
from engine.model.refs import ModelFiles
from engine.model.weights import load_weights
from tests.unit.model_files_help import smollm, tiny_llama, write_gguf

Kind = gguf.GGMLQuantizationType


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, tiny_llama(), Kind.Q8_0)
    return path


def load(path: Path) -> dict[str, torch.Tensor]:
    files = ModelFiles("gguf", path, str(path))
    return load_weights(files, load_config(files), torch.float32)


def test_every_type_of_value_is_read_as_the_gguf_package_reads_it(tmp_path):
    path = tmp_path / "values.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -100)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -30000)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -2_000_000_000)
    writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -(2**62))
    writer.add_float32("f32", 0.1)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "naïve 🚀")
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("words", ["a", "", "ñ"])
    writer.add_uint32("general.alignment", 64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    fields = gguf.GGUFReader(path).fields
    theirs = {k: f.contents() for k, f in fields.items() if not k.startswith("GGUF.")}
    assert dict(read_header(path).metadata) == theirs


def test_the_tensor_table_is_that_of_the_gguf_package(tiny):
    theirs = [
        (t.name, tuple(t.shape[::-1].tolist()), int(t.tensor_type), t.data_offset)
        for t in gguf.GGUFReader(tiny).tensors
    ]
    ours = [(t.name, t.shape, t.type_id, t.offset) for t in read_header(tiny).tensors.values()]
    assert ours == theirs


@pytest.mark.parametrize(
    "kind",
    [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1],
    ids=lambda kind: kind.name,
)
def test_each_quantisation_loads_as_the_values_it_stands_for(tmp_path, kind):
    expected = write_gguf(tmp_path / "m.gguf", tiny_llama(attention_bias=True), kind)
    found = load(tmp_path / "m.gguf")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_the_default_model_loads_bit_for_bit_as_transformers_loads_it():
    """The parts of transformers' loader, put together: whole, it takes a minute for the file."""
    path, config = smollm().path, load_config(smollm())
    heads = {"num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads}
    processor = LlamaTensorProcessor(heads)
    name_map = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.layers)
    shapes = {t.name: t.shape for t in GgufHeader.from_file(str(path)).tensors}
    found = load(path)
    names = {f"{name_map.get_name(n.removesuffix('.weight'))}.weight": n for n in found}
    tensors = load_gguf_state_dict(GgufHeader.from_file(str(path)))
    assert names.keys() == tensors.keys()
    for name, lazy in tensors.items():
        values = lazy[...]
        if lazy.ggml_type in GGML_BLOCK:
            values = dequantize(values.reshape(-1), lazy.ggml_type).reshape(shapes[name])
        expected = processor.process(values.numpy(), name).weights
        assert torch.equal(found[names[name]], torch.from_numpy(expected)), name


@pytest.mark.parametrize(
    "name", ["rope_freqs.weight", "blk.0.attn_sinks.weight", "blk.0.attn_q", "odd"]
)
def test_a_name_without_a_counterpart_stays(name):
    assert hf_name(name, FAMILIES["llama"]) == name


@pytest.mark.parametrize(
    ("head", "says"),
    [
        pytest.param(b"", "too short", id="empty"),
        pytest.param(b"<html>not found</html>   ", "first bytes", id="web-page"),
        pytest.param(b"GGUF\x01\0\0\0" + bytes(16), "version 1", id="old-version"),
        pytest.param(b"GGUF\0\0\0\x03" + bytes(16), "version 50331648", id="big-endian"),
    ],
)
def test_a_file_that_is_no_gguf_says_what_it_begins_with(tmp_path, head, says):
    (tmp_path / "m.gguf").write_bytes(head)
    with pytest.raises(ModelUnsupported, match=says) as caught:
        read_header(tmp_path / "m.gguf")
    assert "m.gguf" in caught.value.message


@settings(max_examples=60, deadline=None)
@given(cut=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_short_anywhere_is_refused(tiny, tmp_path_factory, cut):
    data = tiny.read_bytes()
    path = tmp_path_factory.mktemp("cut") / "cut.gguf"
    # The last tensor's padding may go: nothing is stored there.
    path.write_bytes(data[: int(cut * (len(data) - 32))])
    with pytest.raises(ModelUnsupported, match=r"cut(\.gguf)?"):
        load(path)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_damaged_header_is_read_or_refused_but_never_crashes(tiny, tmp_path_factory, data):
    content = bytearray(tiny.read_bytes())
    first_tensor = min(t.offset for t in read_header(tiny).tensors.values())
    place = st.integers(8, first_tensor - 1)
    for at, byte in data.draw(st.lists(st.tuples(place, st.integers(0, 255)), max_size=4)):
        content[at] = byte
    path = tmp_path_factory.mktemp("bad") / "bad.gguf"
    path.write_bytes(content)
    with contextlib.suppress(ModelUnsupported):
        assert read_header(path).path == path


def test_an_unknown_tensor_type_is_named(tiny, tmp_path):
    content = bytearray(tiny.read_bytes())
    name = b"token_embd.weight"
    at = content.index(name) + len(name) + 4 + 2 * 8  # after the name: dimensions, two sizes
    content[at : at + 4] = (250).to_bytes(4, "little")
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ModelUnsupported, match=r"token_embd\.weight has the unknown GGML type 250"):
        load(tmp_path / "m.gguf")


def test_a_quantisation_that_gguf_cannot_dequantise_is_named(tiny, tmp_path):
    content = bytearray(tiny.read_bytes())
    name = b"token_embd.weight"
    at = content.index(name) + len(name) + 4 + 2 * 8
    content[at : at + 4] = int(Kind.Q8_1).to_bytes(4, "little")
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ModelUnsupported, match="Q8_1"):
        load(tmp_path / "m.gguf")
