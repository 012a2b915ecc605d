"""Nothing of a step is left on the host: run with all weights and the pool on torch's meta device,
which computes no values and refuses tensors of another device, as a GPU does.

What has to look at values (experts' loads, the chosen tokens) cannot be run so.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from core.ids import AttemptKey, BlockId, RequestId
from core.sampling import BadWord, LogitBias, Sampling
from engine.device import logits as change
from engine.device.backend import Backend, TorchBackend
from engine.device.batch import build_batch
from engine.device.cuda import FlexBackend
from engine.device.forward import Forward
from engine.device.graphs import GraphedForward, Limits
from engine.device.pool import KVPool
from engine.device.rank import best
from engine.device.runner import kv_layout
from engine.model.build import build_decoder
from engine.model.config_file import load_config
from engine.model.ops import TorchOps
from engine.model.quantise import int8
from engine.model.refs import resolve
from engine.model.weight import on_device
from engine.model.weights import load_weights
from engine.policy.plan import LayerGroup, Plan, SampleAt, Work
from tests import models

META = torch.device("meta")
KEY = AttemptKey(RequestId("r"), 0)


def attend(query: Tensor, key: Tensor, value: Tensor, block_mask: Any, **how: Any) -> Tensor:
    """In place of FlexAttention, which does not take this device."""
    assert key.device == value.device == block_mask.kv_indices.device == META
    assert block_mask.kv_num_blocks.device == META
    indices = [torch.zeros(1, dtype=torch.int64, device=META)] * 4
    assert block_mask.mask_mod(*indices).device == META
    return query + 0


BACKENDS: dict[str, Callable[[], Backend]] = {
    "torch": lambda: TorchBackend.of(torch.float32, META),
    "flex": lambda: FlexBackend(torch.float32, META, attend),
}


def work(token_ids: tuple[int, ...], start: int, *layers: int) -> Work:
    blocks = tuple(BlockId(i) for i in range(-(-(start + len(token_ids)) // 16)))
    group = LayerGroup(*layers) if layers else None
    return Work(KEY, token_ids, start, blocks, SampleAt(Sampling(), 0), group)


def test_this_device_refuses_what_is_on_the_host() -> None:
    with pytest.raises(RuntimeError, match="device"):
        torch.empty(3, device=META) + torch.empty(3)


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text"])
def test_a_step_stays_on_its_device(
    tmp_path: Path, family: str, backend: Callable[[], Backend]
) -> None:
    on, files = backend(), resolve(str(models.make(family, tmp_path)))
    config = load_config(files)
    weights = load_weights(files, config, torch.float32)
    moved = {name: on_device(weight, META) for name, weight in weights.items()}
    model = build_decoder(config, moved, on.ops)
    pool = KVPool.on(META, kv_layout(config, 16, "float32"), 5)
    forwards = [Forward(model, pool, on)]
    if isinstance(on, FlexBackend):
        recorded = GraphedForward(
            model, pool, on, lambda body: lambda: body(), Limits(4, 2, BlockId(4))
        )
        recorded.record(lambda phase: None)
        forwards.append(recorded)  # type: ignore[arg-type]
    first, rest = (0, 1, config.layers), (1, config.layers, config.layers)
    plans = [
        (work((1, 2, 3), 0), work((5,), 20), work((6,), 3)),
        (work((5,), 20), work((6,), 3)),
        (work((1, 2), 0, *first),),
        (work((1, 2), 0, *rest), work((5,), 20)),
    ]
    with torch.inference_mode():
        for forward in forwards:
            for works in plans:
                batch = build_batch(Plan(works), pool.layout, META)
                hidden = forward(Plan(works), batch)
                assert model.logits(hidden[batch.sample_rows]).device == META


def test_quantised_weights_move_whole() -> None:
    weight = on_device(int8(torch.randn(8, 32)), META)
    assert TorchOps(torch.float32).linear([weight])(torch.empty(2, 32, device=META)).device == META


def test_logits_are_steered_where_they_are() -> None:
    logits = torch.empty(2, 97, device=META)
    sampling = Sampling(
        logit_bias=(LogitBias(3, 1.0),),
        bad_words=(BadWord((4,)),),
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.5,
    )
    asks = [SampleAt(Sampling(), 0), SampleAt(sampling, 2, (1, 2, 3), 1)]
    change.restrict(logits, torch.zeros(2, 4, dtype=torch.int32), [1])
    change.forbid(logits, [change.banned(ask, ()) for ask in asks])
    change.bias(logits, asks)
    change.penalise(logits, asks)
    assert best(logits, 5).device == META
