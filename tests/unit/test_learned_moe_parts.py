"""How the learned model is made: texts, balance, training, signatures."""

import ast
import gettext
import struct
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.learned_moe import checkpoint, french, picture, signatures, stdlib_text, sums
from benchmarks.learned_moe.digest import is_held_out
from benchmarks.learned_moe.measure import Report
from benchmarks.learned_moe.training import Progress, Recipe, balance_loss, train


def test_a_problem_is_on_one_side_only_and_its_answer_is_right() -> None:
    trained, held = sums.problems(held_out=False), sums.problems(held_out=True)
    questions = [p.question for p in trained + held]
    assert len(set(questions)) == len(questions) == 1000 + 955
    assert len(questions) / 20 < len(held) < len(questions) / 12
    for problem in held:
        assert eval(problem.question.removesuffix("=")) == int(problem.answer)


def test_code_is_valid_and_bare() -> None:
    for document in islice(stdlib_text.code(), 60):
        for node in ast.walk(ast.parse(document)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                assert ast.get_docstring(node) is None


def test_prose_is_sentences_in_paragraphs() -> None:
    for document in islice(stdlib_text.prose(), 60):
        for paragraph in document.splitlines():
            assert paragraph[0].isupper()
            assert paragraph[-1] in ".:"
            assert "::=" not in paragraph


def test_messages_are_what_gettext_reads(tmp_path: Path) -> None:
    entries = {
        b"": b"Content-Type: text/plain; charset=UTF-8\n",
        b"a\0as": b"un\0des",
        b"b": b"\xc3\xa9t\xc3\xa9",
    }
    path = tmp_path / "x.mo"
    path.write_bytes(_mo(entries))
    with path.open("rb") as file:
        read = gettext.GNUTranslations(file)
    assert list(french.messages(path))[1:] == [
        read.ngettext("a", "as", 1),
        read.ngettext("a", "as", 2),
        read.gettext("b"),
    ]


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(french, "PACKAGES", {"no-such-package": "1"})
    with pytest.raises(french.MissingText, match="no-such-package is not installed; run: pip"):
        list(french.documents())


def test_about_one_text_in_sixteen_is_held_out() -> None:
    assert 180 < sum(is_held_out(str(n)) for n in range(4000)) < 320


def test_balance_is_one_when_even_and_experts_over_top_k_when_all_choose_the_same() -> None:
    even = 9.0 * torch.eye(16).repeat(8, 1) + 9.0 * torch.eye(16).roll(1, 0).repeat(8, 1)
    same = torch.zeros(128, 16).index_fill(1, torch.tensor([3, 7]), 30.0)
    assert balance_loss([even, even], 2).item() == pytest.approx(1.0, abs=1e-4)
    assert balance_loss([same], 2).item() == pytest.approx(8.0, abs=1e-4)
    assert balance_loss([even, same], 2).item() == pytest.approx(4.5, abs=1e-4)


def test_training_is_repeatable_and_lowers_the_loss_of_every_domain() -> None:
    streams = {"up": torch.arange(600) % 40, "down": 100 - torch.arange(600) % 30}
    recipe = replace(Recipe(), steps=8, batch=128, lengths=(32, 64), warmup=2)
    first, second = _trained(streams, recipe), _trained(streams, recipe)
    assert first == second
    for domain in streams:
        assert first[-1].losses[domain] < first[0].losses[domain] - 1.0


def test_a_signature_holds_the_share_of_each_expert_in_a_layers_choices() -> None:
    model = checkpoint.build(0)
    texts = torch.randint(1024, (3, 20), generator=torch.Generator().manual_seed(1))
    found = signatures.of(model, texts)
    assert found.shape == (3, 4, 16)
    assert torch.allclose(found.sum(-1), torch.ones(3, 4))
    alone = signatures.of(model, texts[1:2])
    assert torch.equal(found[1:2], alone)


def test_texts_are_of_the_domain_whose_centroid_is_nearest() -> None:
    centroids = {"a": [[1.0, 0.0, 0.0]], "b": [[0.0, 0.5, 0.5]]}
    found = torch.tensor([[[0.8, 0.1, 0.1]], [[0.1, 0.9, 0.0]]])
    assert signatures.classify(found, centroids) == ["a", "b"]
    assert signatures.accuracy({"a": found}, centroids) == 0.5


def test_a_text_is_not_compared_with_itself() -> None:
    found = {"a": torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]), "b": torch.tensor([[[1.0, 0.0]]] * 2)}
    assert signatures.cosines(found) == [[0.0, 0.5], [0.5, 1.0]]


def test_shades_follow_the_share() -> None:
    layer = [[0.0, 0.1, 0.25, 0.65]]
    report = Report({"a": 2.0}, {"a": 4.0}, 0.5, 1.0, [[1.0]], {"a": layer})
    assert list(picture.lines(report))[-1] == "  a           ░░ ▒▒ ▓▓"


def _trained(streams: dict[str, Tensor], recipe: Recipe) -> list[Progress]:
    told: list[Progress] = []
    train(checkpoint.build(0), streams, recipe, told.append)
    return told


def _mo(entries: dict[bytes, bytes]) -> bytes:
    """A catalogue as msgfmt writes it: two tables of (length, offset), then the strings."""
    originals, translations = 28, 28 + 8 * len(entries)
    table, strings, at = b"", b"", 28 + 16 * len(entries)
    for text in (*entries, *entries.values()):
        table += struct.pack("<2I", len(text), at + len(strings))
        strings += text + b"\0"
    header = struct.pack("<7I", 0x950412DE, 0, len(entries), originals, translations, 0, 0)
    return header + table + strings
