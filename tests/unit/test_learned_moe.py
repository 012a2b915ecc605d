"""The committed model: it has learned its domains, and its experts tell them apart."""

from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.learned_moe import checkpoint, held_out, picture, signatures, sums
from benchmarks.learned_moe.corpus import DOMAINS
from benchmarks.learned_moe.digest import is_held_out
from benchmarks.learned_moe.measure import Report, measure, right_sums
from benchmarks.learned_moe.tokens import SNIPPET, snippets, stream

FOLDER = checkpoint.FOLDER
LIMIT_BYTES = 4_000_000


@cache
def report() -> Report:
    return measure(FOLDER)


@pytest.mark.parametrize("domain", DOMAINS)
def test_unseen_text_is_less_surprising_than_to_a_counter_of_its_own_tokens(domain: str) -> None:
    assert report().perplexity[domain] < 0.3 * report().unigram[domain]


def test_sums_never_seen_are_answered_far_above_chance() -> None:
    assert report().right_sums > 0.8


def test_signatures_tell_the_domains_of_unseen_snippets() -> None:
    assert report().right_domains >= 0.95


def test_signatures_are_alike_within_a_domain_and_unlike_across() -> None:
    cosines = torch.tensor(report().cosines)
    within, across = cosines.diagonal(), cosines[~torch.eye(len(DOMAINS), dtype=torch.bool)]
    assert within.min() > across.max()
    assert within.mean() - across.mean() > 0.3


def test_no_expert_is_idle_and_none_does_everything() -> None:
    shares = torch.tensor(list(report().centroids.values())).mean(0)
    even = 1 / shares.shape[1]
    assert shares.min() > 0.2 * even
    assert shares.max() < 4 * even


def test_what_it_writes_stays_in_the_domain_of_what_it_read() -> None:
    model, texts = checkpoint.load_model(), held_out.read(FOLDER)
    tokenizer = checkpoint.load_tokenizer()
    prompts = torch.stack([snippets(stream(tokenizer, texts[n]))[1] for n in DOMAINS])
    torch.manual_seed(0)
    # Tokens that end a document are as good as any: new text follows.
    written = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=SNIPPET,
        do_sample=True,
        temperature=0.7,
        eos_token_id=None,
        pad_token_id=0,
    )[:, SNIPPET:]
    found = signatures.of(model, written)
    assert signatures.classify(found, signatures.read(FOLDER)) == list(DOMAINS)


def test_right_sums_are_those_that_greedy_generation_answers() -> None:
    model, tokenizer = checkpoint.load_model(), checkpoint.load_tokenizer()
    shown = [sums.Problem("1+1=", "2")] * 4
    before = "".join(f"{p.question}{p.answer}\n" for p in shown)
    for problem in sums.problems(held_out=True)[100:112]:
        prompt = torch.tensor([tokenizer.encode(before + problem.question).ids])
        out = model.generate(prompt, max_new_tokens=4, do_sample=False, eos_token_id=None)
        text = tokenizer.decode(out[0, prompt.shape[1] :].tolist())
        answered = text.startswith(f"{problem.answer}\n")
        assert right_sums(model, tokenizer, [*shown, problem]) == float(answered)


def test_transformers_loads_the_folder_by_itself() -> None:
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    assert model.config.model_type == "qwen3_moe"
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    text = "def été(): return '12+34='\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False)
    assert chat == text


def test_the_folder_is_small_enough_to_commit() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= LIMIT_BYTES


def test_no_shipped_text_was_trained_on() -> None:
    texts = held_out.read(FOLDER)
    for domain in ("prose", "code", "french"):
        # The last document is cut short.
        assert all(map(is_held_out, texts[domain][:-1]))
        assert len(texts[domain]) > 1
    lines = [line for document in texts["sums"][:-1] for line in document.splitlines()]
    assert all(is_held_out(f"{line.partition('=')[0]}=") for line in lines)


def test_the_picture_shows_every_layer_and_domain() -> None:
    lines = list(picture.lines(report()))
    assert sum(line.startswith("layer ") for line in lines) == 4
    for domain in DOMAINS:
        assert sum(line.startswith(f"  {domain:<8}") for line in lines) == 4
        assert sum(line.startswith(domain) for line in lines) == 1
