"""Tokenizers from Hugging Face folders and odd GGUF files: BOS, settings, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import AutoTokenizer

from core.errors import BadRequest, ModelUnsupported
from engine.model.refs import ModelFiles
from engine.text.load import load_tokenizer
from engine.text.tokenizer import TextTokenizer
from tests.unit.model_files_help import VOCAB, smollm_oracle, tiny_llama, write_gguf

CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": 49152,
    "eos_token_id": 2,
}


def write_folder(folder: Path, backend: Tokenizer | None, **tokenizer_config: Any) -> ModelFiles:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    if backend is not None:
        backend.save(str(folder / "tokenizer.json"))
    return ModelFiles("hf", folder, str(folder))


def smollm_backend() -> Tokenizer:
    return Tokenizer.from_str(smollm_oracle().backend_tokenizer.to_str())


def refusal(files: ModelFiles) -> str:
    with pytest.raises(ModelUnsupported) as caught:
        load_tokenizer(files)
    assert caught.value.field == "model.ref"
    return caught.value.message


# ---------------------------------------------------------------------- Hugging Face folders


@pytest.fixture(scope="module")
def saved_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    smollm_oracle().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_a_saved_tokenizer_loads_as_transformers_loads_it(saved_folder):
    ours = load_tokenizer(ModelFiles("hf", saved_folder, str(saved_folder)))
    theirs = AutoTokenizer.from_pretrained(saved_folder)
    text = "<|im_start|>user\nEin Bär & 3 🐻  tanzen<|im_end|>"
    assert ours.encode(text) == theirs.encode(text)
    messages = [{"role": "user", "content": "Hi"}]
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.render_chat(messages) == expected
    joined = b"".join(map(ours.token_bytes, ours.encode(text))).decode()
    assert joined == theirs.decode(theirs.encode(text), skip_special_tokens=True)


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path):
    backend = smollm_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = load_tokenizer(write_folder(tmp_path, backend))
    assert len(tokenizer.encode("one two three four five six")) == 6


def with_bos(backend: Tokenizer) -> Tokenizer:
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    return backend


@pytest.mark.parametrize(
    ("implied", "stated", "adds"),
    [
        (False, {}, False),
        (True, {}, True),
        (False, {"add_bos_token": True}, True),
        (True, {"add_bos_token": False}, False),
    ],
    ids=["neither", "tokenizer.json", "stated", "stated-not"],
)
def test_bos_is_added_only_if_the_model_says_so(tmp_path, implied, stated, adds):
    backend = with_bos(smollm_backend()) if implied else smollm_backend()
    settings = {"bos_token": {"content": "<|im_start|>"}, **stated}
    tokenizer = load_tokenizer(write_folder(tmp_path, backend, **settings))
    assert tokenizer.encode("hello") == ([1, 28120] if adds else [28120])
    assert tokenizer.encode("") == ([1] if adds else [])


def test_a_bos_that_the_text_spells_is_not_doubled(tmp_path):
    files = write_folder(tmp_path, with_bos(smollm_backend()), bos_token="<|im_start|>")
    assert load_tokenizer(files).encode("<|im_start|>hello") == [1, 28120]


def test_added_tokens_are_their_text_unless_special(tmp_path):
    backend = smollm_backend()
    backend.add_tokens([AddedToken("<think>"), AddedToken("<hidden>", special=True)])
    files = write_folder(tmp_path, backend)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 49154}))
    tokenizer = load_tokenizer(files)
    assert tokenizer.encode("<think><hidden>") == [49152, 49153]
    assert [tokenizer.token_bytes(i) for i in (49152, 49153)] == [b"<think>", b""]


def test_a_token_beyond_the_embedding_table_is_a_bad_request(tmp_path):
    backend = smollm_backend()
    backend.add_tokens([AddedToken("[PAD]", special=True)])
    tokenizer = load_tokenizer(write_folder(tmp_path, backend))
    assert tokenizer.vocab_size == 49152
    with pytest.raises(BadRequest, match=r"no embedding for the token '\[PAD\]'"):
        tokenizer.encode("a [PAD] b")


def sentencepiece_backend() -> Tokenizer:
    """The shape of Llama 2's and Mistral's tokenizer.json."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    pieces += ["▁", "a", "b", "e", "é", "▁a", "▁ab", "be"]
    merges = [("▁", "a"), ("▁a", "b"), ("b", "e")]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    bpe = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = Tokenizer(bpe)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    strip = decoders.Strip(" ", 1, 0)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory) -> TextTokenizer:
    return load_tokenizer(write_folder(tmp_path_factory.mktemp("spm"), sentencepiece_backend()))


@settings(max_examples=100, deadline=None)
@given(text=st.text("abeé ñ\n🚀", min_size=1, max_size=20))
def test_a_sentencepiece_vocabulary_spells_bytes_and_blanks(sentencepiece, text):
    ids = sentencepiece.encode(text)
    assert b"".join(map(sentencepiece.token_bytes, ids)).decode() == " " + text
    assert sentencepiece_backend().decode(ids) == text


def test_an_unknown_decoder_is_named(tmp_path):
    backend = smollm_backend()
    backend.decoder = decoders.WordPiece()
    assert "['WordPiece']" in refusal(write_folder(tmp_path, backend))


def test_a_folder_without_tokenizer_json_says_how_to_get_one(tmp_path):
    assert "save_pretrained" in refusal(write_folder(tmp_path, None))


def test_a_damaged_tokenizer_json_is_named(tmp_path):
    files = write_folder(tmp_path, None)
    (tmp_path / "tokenizer.json").write_text('{"model": 3')
    assert "tokenizer.json is not usable" in refusal(files)


# ------------------------------------------------------------------------------- GGUF files


def gguf_files(folder: Path, **metadata: Any) -> ModelFiles:
    path = folder / "m.gguf"
    changes = {f"tokenizer.{k}": v for k, v in metadata.items()}
    write_gguf(path, tiny_llama(), metadata=changes)
    return ModelFiles("gguf", path, str(path))


@pytest.mark.parametrize(
    ("metadata", "ids"),
    [
        pytest.param({}, [32], id="smollm-default"),
        pytest.param({"ggml.add_bos_token": True}, [94, 32], id="stated"),
        pytest.param({"ggml.pre": "llama-bpe"}, [94, 32], id="llama3-default"),
        pytest.param({"ggml.pre": "llama-bpe", "ggml.add_bos_token": False}, [32], id="stated-not"),
        pytest.param({"ggml.add_bos_token": True, "ggml.bos_token_id": None}, [32], id="no-bos"),
    ],
)
def test_a_gguf_file_decides_about_bos(tmp_path, metadata, ids):
    assert load_tokenizer(gguf_files(tmp_path, **metadata)).encode("A") == ids


def test_user_defined_tokens_are_never_cut_and_are_their_text(tmp_path):
    tokens = [*VOCAB[:93], "ABC é", *VOCAB[94:]]
    kinds = [1] * 93 + [4, 3, 3]
    files = gguf_files(tmp_path, **{"ggml.tokens": tokens, "ggml.token_type": kinds})
    tokenizer = load_tokenizer(files)
    assert tokenizer.encode("xABC éy") == [87, 93, 88]
    assert tokenizer.token_bytes(93) == "ABC é".encode()


@pytest.mark.parametrize(
    ("metadata", "names"),
    [
        pytest.param({"ggml.model": "t5"}, "tokenizer type 't5'", id="unigram"),
        pytest.param({"ggml.model": None}, "tokenizer type None", id="no-tokenizer"),
        pytest.param({"ggml.pre": "tekken"}, "pre-tokenizer 'tekken'", id="pre-tokenizer"),
        pytest.param({"ggml.merges": ["A ZZ"]}, "unusable merges", id="merges"),
        pytest.param({"chat_template": "{% if %}"}, "chat template", id="template"),
    ],
)
def test_an_unsupported_vocabulary_is_named(tmp_path, metadata, names):
    assert names in refusal(gguf_files(tmp_path, **metadata))
