"""A random model under grammars, through scheduler, runner and sampler: what comes out matches."""

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.ids import AttemptKey, RequestId
from core.messages import AttemptFailed, FinishReason, Prefill, StepEvents, TokenEvent
from core.sampling import Grammar, GrammarKind, Sampling
from engine.device.backend import TorchBackend
from engine.device.pool import KVPool
from engine.device.runner import Runner, kv_layout
from engine.grammar.book import GrammarBook
from engine.grammar.shelf import GrammarShelf
from engine.loop import Engine
from engine.model import refs
from engine.model.build import build_decoder
from engine.model.config_file import load_config
from engine.model.decoder import Decoder
from engine.model.weights import load_weights
from engine.policy.config import SchedulerConfig
from engine.policy.scheduler import Scheduler
from tests.property.paged_model import config
from tests.rig.tiny import tiny_model
from tests.unit.grammar_help import EOS, GRAMMARS, LIMIT_S, TOKENS, Direct, regex, settled, text_of

KIND = GrammarKind
BLOCK = 16
ROOMY, TIGHT = 400, 22


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    files = refs.resolve(str(tiny_model(tmp_path_factory.mktemp("tiny"))))
    found = load_config(files)
    ops = TorchBackend.of(torch.float32).ops
    return build_decoder(found, load_weights(files, found, torch.float32), ops)


def settings_of(blocks: int) -> SchedulerConfig:
    return config(
        total_blocks=blocks,
        block_size=BLOCK,
        chunk_tokens=64,
        max_running=16,
        max_queued_tokens=10_000,
        max_model_len=600,
        vocab_size=len(TOKENS),
        eos_ids=frozenset((EOS,)),
        lease_s=60.0,
    )


class Worker:
    """Everything of a worker but its threads and sessions."""

    def __init__(self, decoder: Decoder, blocks: int = ROOMY, shelf: GrammarShelf | None = None):
        layout = kv_layout(decoder.config, BLOCK, "float32")
        memory = bytearray(blocks * layout.block_bytes)
        pool = KVPool(layout, blocks, memoryview(memory))
        self.layout = layout
        self.shelf = shelf or GrammarShelf([Direct()])
        book = GrammarBook(self.shelf, len(TOKENS), [EOS])
        self.runner = Runner(decoder, pool, TorchBackend.of(torch.float32), book)
        self.scheduler = Scheduler(settings_of(blocks), grammars=self.shelf)
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, FinishReason] = {}

    def submit(self, name: str, sampling: Sampling, emitted: tuple[int, ...] = ()) -> None:
        """emitted: what an earlier attempt put out."""
        if sampling.grammar is not None:
            assert settled(self.shelf, sampling.grammar).ready
        key = AttemptKey(RequestId(name), len(emitted))
        tokens = (*prompt_of(name), *emitted)
        self.scheduler.prefill(Prefill(key, tokens, sampling, len(emitted)), "owner", 0.0)

    def run(self) -> "Worker":
        for _ in range(5000):
            plan = self.scheduler.plan(0.0)
            if not plan.works:
                return self
            out = self.scheduler.commit(plan, self.runner.run(plan), 0.0)
            for event in (t for _, e in out.events if isinstance(e, StepEvents) for t in e.events):
                self.take(event)
        raise AssertionError("still busy after 5000 steps")

    def take(self, event: TokenEvent) -> None:
        name = event.key.request_id
        self.outputs.setdefault(name, []).extend(event.token_ids)
        if event.finish:
            self.finished[name] = event.finish

    def preemptions(self) -> int:
        return {c.name: c.value for c in self.scheduler.report(0.0).counters}["preemptions"]


def prompt_of(name: str) -> tuple[int, ...]:
    return tuple(name.encode()) * 4


def ruled(grammar: Grammar | None, seed: int, **changes: object) -> Sampling:
    base = Sampling(temperature=1.0, seed=seed, max_tokens=500, grammar=grammar)
    return replace(base, **changes)  # type: ignore[arg-type]


def check(kind: GrammarKind, text: str) -> None:
    """Against readings of the grammars that have nothing to do with xgrammar."""
    match kind:
        case KIND.REGEX:
            assert re.fullmatch(GRAMMARS[kind].source, text)
        case KIND.EBNF:
            assert re.fullmatch(r"[a-c]{1,3}(-[a-c]{1,3})*\.", text)
        case KIND.JSON_SCHEMA:
            check_object(text)
        case KIND.STRUCTURAL_TAG:
            assert text.startswith("<a>")
            assert text.endswith("</a>")
            assert len(json.loads(text[3:-4])) <= 6


def check_object(text: str) -> None:
    found = json.loads(text)
    assert set(found) == {"name", "age", "tags"}
    assert len(found["name"]) <= 6
    assert type(found["age"]) is int
    assert 0 <= found["age"] <= 99
    assert len(found["tags"]) <= 2
    assert set(found["tags"]) <= {"ab", "true"}


def submit_all(worker: Worker, seed: int) -> None:
    for kind, grammar in GRAMMARS.items():
        worker.submit(f"{kind}-1", ruled(grammar, seed))
        worker.submit(f"{kind}-2", ruled(grammar, seed + 1, temperature=0.7, top_p=0.9))
    worker.submit("free", ruled(None, seed, max_tokens=40, ignore_eos=True))


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 1 << 40))
def test_every_output_matches_its_grammar_to_the_end(decoder: Decoder, seed: int) -> None:
    worker = Worker(decoder)
    submit_all(worker, seed)
    worker.run()
    for name, output in worker.outputs.items():
        if name == "free":
            assert len(output) == 40
            continue
        assert worker.finished[name] is FinishReason.STOP
        assert output[-1] == EOS
        check(KIND(name[:-2]), text_of(output))


def test_preempted_sequences_go_on_as_if_nothing_had_been(decoder: Decoder) -> None:
    roomy, tight = Worker(decoder), Worker(decoder, TIGHT)
    for worker in (roomy, tight):
        for i in range(6):
            worker.submit(f"json-{i}", ruled(GRAMMARS[KIND.JSON_SCHEMA], i))
        worker.run()
    assert tight.preemptions() > 2
    assert not roomy.preemptions()
    assert tight.outputs == roomy.outputs


@pytest.mark.parametrize("kind", KIND)
def test_another_attempt_goes_on_where_the_last_one_was(decoder: Decoder, kind: KIND) -> None:
    whole = Worker(decoder)
    whole.submit("x", ruled(GRAMMARS[kind], 5))
    output = tuple(whole.run().outputs["x"])
    for emitted in (1, len(output) // 2, len(output) - 1):
        worker = Worker(decoder)
        worker.submit("x", ruled(GRAMMARS[kind], 5), output[:emitted])
        assert tuple(worker.run().outputs["x"]) == output[emitted:]


def test_greedy_output_is_the_likeliest_that_the_grammar_allows(decoder: Decoder) -> None:
    worker = Worker(decoder)
    worker.submit("x", ruled(regex("[ab]{20}"), 0, temperature=0.0))
    worker.submit("y", ruled(regex("z{3}"), 0, min_tokens=9, logprobs=1))
    worker.run()
    assert re.fullmatch("[ab]{20}", text_of(worker.outputs["x"]))
    assert text_of(worker.outputs["y"]) == "zzz"  # a grammar's end comes before min_tokens


def test_cut_short_it_is_the_beginning_of_something_that_matches(decoder: Decoder) -> None:
    worker = Worker(decoder)
    worker.submit("x", ruled(regex("(abc){20}"), 0, max_tokens=7))
    worker.run()
    assert worker.finished["x"] is FinishReason.LENGTH
    assert ("abc" * 20).startswith(text_of(worker.outputs["x"]))


class Running:
    """The worker on its engine thread, with a compiler that the test holds up."""

    def __init__(self, decoder: Decoder, gate: threading.Event) -> None:
        self.shelf = GrammarShelf([Direct({"slow": gate}), Direct({"slow": gate})])
        worker = Worker(decoder, shelf=self.shelf)
        clock = iter(i / 1000 for i in range(10**9))
        self.engine = Engine(
            worker.scheduler, worker.runner, worker.layout, lambda: next(clock), self._sink
        )
        self.shelf.bind(self.engine.wake)
        self.events: list[object] = []
        self._changed = threading.Condition()

    def _sink(self, output: object) -> None:
        with self._changed:
            self.events += [event for _, event in output.events]  # type: ignore[attr-defined]
            self._changed.notify_all()

    def submit(self, name: str, grammar: Grammar | None) -> AttemptKey:
        key = AttemptKey(RequestId(name), 0)
        self.engine.prefill(Prefill(key, prompt_of(name), ruled(grammar, 1)), "me")
        return key

    def ended(self, key: AttemptKey) -> list[object]:
        """All terminal events of it."""
        steps = [t for e in self.events if isinstance(e, StepEvents) for t in e.events]
        failed = [e for e in self.events if isinstance(e, AttemptFailed)]
        return [e for e in [*steps, *failed] if e.key == key and getattr(e, "finish", True)]

    def until_ended(self, key: AttemptKey) -> object:
        with self._changed:
            assert self._changed.wait_for(lambda: self.ended(key), LIMIT_S)
        (event,) = self.ended(key)
        return event


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def running(decoder: Decoder, gate: threading.Event) -> Iterator[Running]:
    made = Running(decoder, gate)
    made.engine.start()
    yield made
    gate.set()
    assert made.engine.stop(LIMIT_S)
    made.shelf.close()


def test_while_a_grammar_is_compiled_everybody_else_is_served(
    running: Running, gate: threading.Event
) -> None:
    slow = running.submit("slow", regex("slow"))
    others = [running.submit("free", None), running.submit("quick", regex("quick"))]
    for other in others:
        assert isinstance(running.until_ended(other), TokenEvent)
    assert not running.ended(slow)
    assert running.engine.report().waiting == 1
    gate.set()
    assert isinstance(running.until_ended(slow), TokenEvent)


def test_a_bad_grammar_fails_its_own_request_once(running: Running) -> None:
    bad, good = running.submit("bad", regex("[")), running.submit("good", regex("ok"))
    failed = running.until_ended(bad)
    assert isinstance(failed, AttemptFailed)
    assert (failed.fault.code, failed.fault.field) == ("bad_request", "response_format")
    assert isinstance(running.until_ended(good), TokenEvent)
    assert len(running.ended(bad)) == 1


def test_cancelled_while_its_grammar_is_compiled_it_is_never_heard_of(
    running: Running, gate: threading.Event
) -> None:
    slow = running.submit("slow", regex("slow"))
    assert running.engine.cancel(slow)
    gate.set()
    running.until_ended(running.submit("other", regex("slow")))
    assert not running.ended(slow)
    running.engine.check_integrity()
