"""Whatever the policy, a real model under a real engine gives the tokens of the plain loop."""

import threading
import time

import pytest
import torch

from core.ids import AttemptKey, RequestId
from core.messages import Prefill, StepEvents
from core.ports import StepOutput
from core.sampling import Sampling
from engine.device.backend import TorchBackend
from engine.device.pool import KVPool
from engine.device.runner import Runner, kv_layout
from engine.loop import Engine
from engine.model.decoder import Decoder
from engine.policy.policies.choose import POLICIES
from engine.policy.scheduler import Scheduler
from engine.reference import greedy
from tests.property.paged_model import config
from tests.unit.expert_help import VOCAB, moe_decoder

LIMIT_S = 30.0
BLOCKS, BLOCK = 40, 4
OUTPUT = 12
SHARED = tuple((7 * i + 3) % VOCAB for i in range(18))
PROMPTS = [
    tuple((13 * i + 5 * n) % VOCAB for i in range(n)) for n in (1, 3, 8, 21, 34, 13, 5, 2)
] + [(*SHARED, n) for n in range(3)]
MODELS = {"moe": moe_decoder(), "dense": moe_decoder(seed=1, moe=None)}


class Collector:
    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.finished = 0
        self.changed = threading.Condition()

    def sink(self, output: StepOutput) -> None:
        with self.changed:
            for _, event in output.events:
                for token in event.events if isinstance(event, StepEvents) else ():
                    self.tokens.setdefault(token.key.request_id, []).extend(token.token_ids)
                    self.finished += token.finish is not None
            self.changed.notify_all()

    def wait(self, finished: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.finished >= finished, LIMIT_S)


def engine_over(model: Decoder, policy: str, collector: Collector) -> Engine:
    layout = kv_layout(model.config, BLOCK, "float32")
    pool = KVPool(layout, BLOCKS, memoryview(bytearray(BLOCKS * layout.block_bytes)))
    pool.kv.fill_(float("nan"))
    rules = config(
        policy=policy, layers=model.config.layers, chunk_tokens=10, max_running=6,
        total_blocks=BLOCKS, block_size=BLOCK, max_queued_tokens=1000, vocab_size=VOCAB,
        max_model_len=(BLOCKS - 1) * BLOCK, eos_ids=frozenset(), lease_s=1000.0,
    )  # fmt: skip
    runner = Runner(model, pool, TorchBackend.of(torch.float32))
    return Engine(Scheduler(rules), runner, layout, time.monotonic, collector.sink)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_every_policy_gives_the_tokens_of_the_plain_loop(model: Decoder, policy: str) -> None:
    collector = Collector()
    engine = engine_over(model, policy, collector)
    engine.start()
    try:
        for i, prompt in enumerate(PROMPTS):
            key = AttemptKey(RequestId(str(i)), 1)
            engine.prefill(Prefill(key, prompt, Sampling(max_tokens=OUTPUT)), "test")
        collector.wait(len(PROMPTS))
        engine.check_integrity()
        assert engine.report().free_blocks == BLOCKS
    finally:
        engine.stop(LIMIT_S)
    for i, prompt in enumerate(PROMPTS):
        plain = [step.token for step in greedy(model, model.config, prompt, OUTPUT, ())]
        assert collector.tokens[str(i)] == plain, f"prompt {i}"
