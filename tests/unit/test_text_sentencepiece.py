"""SentencePiece vocabularies from GGUF files: against the algorithm spelled out, transformers, and
the vocabulary of Gemma 3."""

import re
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers.integrations.gguf import convert_gguf_tokenizer

from engine.model.gguf_header import read_header
from engine.model.refs import ModelFiles
from engine.text.gguf_vocab import build
from engine.text.load import load_tokenizer
from engine.text.tokenizer import TextTokenizer
from tests.unit.gemma_help import gemma, needs_gemma
from tests.unit.model_files_help import tiny_llama, write_gguf

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
SPECIAL = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), ("<end_of_turn>", CONTROL)]
PIECES = ["▁a", "ab", "▁ab", "cab", "bc", "ca", "▁", "a", "b", "c", "é", "e"]
"""By falling score.  No piece can overlap with itself: transformers orders such merges by rank,
SentencePiece by place."""
TOKENS = [
    *SPECIAL,
    *((f"<0x{byte:02X}>", BYTE) for byte in range(256)),
    *((piece, NORMAL) for piece in PIECES),
    ("  ", USER),
    ("</h1>", USER),
]
METADATA: Mapping[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.pre": "default",
    "tokenizer.ggml.tokens": [token for token, _ in TOKENS],
    "tokenizer.ggml.token_type": [kind for _, kind in TOKENS],
    "tokenizer.ggml.scores": [-float(i) for i in range(len(TOKENS))],
    "tokenizer.ggml.merges": [],
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content | trim }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


class SentencePiece:
    """Its own way of cutting: what is never cut first, then always the best two neighbours."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        raw = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type"))
        kinds = list(zip(*raw, strict=True))
        self.scores = {token: score for token, score, kind in kinds if kind == NORMAL}
        whole = sorted((t for t, _, kind in kinds if kind in (USER, CONTROL)), key=len)
        self.whole = re.compile(f"({'|'.join(map(re.escape, reversed(whole)))})")

    def cut(self, text: str) -> list[str]:
        found: list[str] = []
        for at, part in enumerate(self.whole.split(text)):
            found += [part] if at % 2 else self.merged(list(part.replace(" ", "▁")))
        return found

    def merged(self, symbols: list[str]) -> list[str]:
        while ranked := [
            (-self.scores[a + b], at)
            for at, (a, b) in enumerate(pairwise(symbols))
            if a + b in self.scores and a in self.scores and b in self.scores
        ]:
            at = min(ranked)[1]
            symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
        return [piece for symbol in symbols for piece in self.spelled(symbol)]

    def spelled(self, symbol: str) -> list[str]:
        if symbol in self.scores:
            return [symbol]
        return [f"<0x{byte:02X}>" for byte in symbol.encode()]


@cache
def vocabulary(**changes: Any) -> Tokenizer:
    return build(METADATA | {f"tokenizer.ggml.{k}": v for k, v in changes.items()}, "m").backend


TEXTS = st.lists(
    st.sampled_from(["a", "b", "c", "ab", "cab", " ", "  ", "é", "🚀", "\n", "</h1>", "<s>"]),
    max_size=14,
).map("".join)


@settings(max_examples=300, deadline=None)
@given(text=TEXTS)
def test_pieces_are_merged_as_sentencepiece_merges_them(text: str) -> None:
    found = vocabulary(add_space_prefix=False).encode(text, add_special_tokens=False)
    assert found.tokens == SentencePiece(METADATA).cut(text)


@settings(max_examples=200, deadline=None)
@given(text=TEXTS.filter(lambda text: "  " not in text))
def test_a_vocabulary_with_a_blank_in_front_is_cut_as_transformers_cuts_it(text: str) -> None:
    """Runs of blanks left out: there transformers loses the tokens of Llama's kind."""
    ours = vocabulary().encode(text, add_special_tokens=False)
    assert ours.ids == llama_oracle().encode(text, add_special_tokens=False).ids


@cache
def llama_oracle() -> Any:
    names = ("tokens", "scores", "token_type")
    raw = {name: METADATA[f"tokenizer.ggml.{name}"] for name in names}
    return convert_gguf_tokenizer("llama", raw | {"tokenizer_type": "llama"})[0]


def loaded(folder: Any, **changes: Any) -> TextTokenizer:
    metadata = dict(METADATA) | {f"tokenizer.{k}": v for k, v in changes.items()}
    model = tiny_llama(vocab_size=len(TOKENS))
    write_gguf(folder / "m.gguf", model, metadata=metadata)
    return load_tokenizer(ModelFiles("gguf", folder / "m.gguf", "m.gguf"))


def test_a_loaded_vocabulary_begins_with_bos_and_gives_back_the_bytes(tmp_path: Any) -> None:
    tokenizer = loaded(tmp_path, **{"ggml.add_space_prefix": False})
    text = "ab  é🚀\n</h1>c"
    ids = tokenizer.encode(text)
    assert ids[0] == 1
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text


def test_the_file_may_ask_for_no_bos_and_a_blank_in_front(tmp_path: Any) -> None:
    tokenizer = loaded(tmp_path, **{"ggml.add_bos_token": False})
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("ab")] == [b" ab"]


def test_the_end_of_a_turn_ends_an_answer(tmp_path: Any) -> None:
    assert loaded(tmp_path).eos_ids == {2, 3}


def test_a_chat_template_that_spells_bos_does_not_double_it(tmp_path: Any) -> None:
    tokenizer = loaded(tmp_path, chat_template=TEMPLATE)
    text = tokenizer.render_chat([{"role": "user", "content": " ab "}])
    assert text == "<s><start_of_turn>user\nab<end_of_turn>\n<start_of_turn>model\n"
    assert tokenizer.encode(text).count(1) == 1


# ------------------------------------------------------------------------------- Gemma 3


@cache
def gemma_tokenizer() -> TextTokenizer:
    return load_tokenizer(gemma())


@cache
def gemma_reference() -> tuple[list[str], SentencePiece]:
    """All tokens, and how the original cuts with them."""
    metadata = read_header(gemma().path).metadata
    return metadata["tokenizer.ggml.tokens"], SentencePiece(metadata)


@needs_gemma
@pytest.mark.parametrize(
    ("text", "ids"),
    [
        pytest.param("Hello world", [9259, 1902], id="prose"),
        pytest.param(
            "  two  spaces\n\n\nnew\ttab",
            [138, 13498, 138, 35220, 109, 1951, 255968, 4823],
            id="blanks",
        ),
        pytest.param("日本語 🚀", [94951, 236743, 242015], id="cjk-and-emoji"),
        pytest.param("naïve café", [1789, 238527, 560, 33443], id="accents"),
        pytest.param(
            "<start_of_turn>user\nHi<end_of_turn>\n", [105, 2364, 107, 10979, 106, 107], id="turns"
        ),
    ],
)
def test_gemma_cuts_text_as_transformers_does(text: str, ids: list[int]) -> None:
    """ids: of transformers' tokenizer for the file, which takes half a minute to build."""
    assert gemma_tokenizer().encode(text) == [2, *ids]
    assert gemma_tokenizer().eos_ids == {1, 106}


@needs_gemma
@settings(max_examples=40, deadline=None)
@given(
    text=st.text(max_size=24)
    | st.lists(
        st.sampled_from(["the ", "  ", "\t", "\n\n", "don't", "<div>", "12", "é", "🏳️‍🌈", "ing"]),
        max_size=8,
    ).map("".join)
)
def test_gemma_merges_pieces_as_sentencepiece_does(text: str) -> None:
    tokenizer = gemma_tokenizer()
    tokens, reference = gemma_reference()
    ids = tokenizer.encode(text)[1:]
    assert [tokens[i] for i in ids] == reference.cut(text)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text.replace("▁", " ")
