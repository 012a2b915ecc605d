"""A plan as bytes, from the leader of a gang to the other ranks.

    head length (4 bytes, big endian) | head (JSON, one list per work) | int32: token ids and block
    ids of the first work, then of the second, …

Only what a forward pass needs: how to sample stays with the leader.
"""

import json
from array import array
from itertools import islice
from typing import Any

from core.ids import AttemptKey, BlockId, RequestId
from core.sampling import Sampling
from engine.policy.plan import LayerGroup, Plan, SampleAt, Work

_LENGTH_BYTES = 4
_WANTED = SampleAt(Sampling(), 0)
"""Stands for every way to sample: the other ranks compute their part of the logits, and what
they make of it nobody sees."""


def encode(plan: Plan) -> bytes:
    head = json.dumps([_head(work) for work in plan.works], separators=(",", ":")).encode()
    numbers = array("i")
    for work in plan.works:
        numbers.extend(work.token_ids)
        numbers.extend(work.block_ids)
    return len(head).to_bytes(_LENGTH_BYTES, "big") + head + numbers.tobytes()


def decode(body: bytes) -> Plan:
    """The plan, its keys included, with one and the same greedy `SampleAt` at every work that is
    to be sampled."""
    end = _LENGTH_BYTES + int.from_bytes(body[:_LENGTH_BYTES], "big")
    numbers = array("i")
    numbers.frombytes(body[end:])
    rest = iter(numbers)
    works = []
    for request, attempt, start, tokens, blocks, sampled, layers in json.loads(
        body[_LENGTH_BYTES:end]
    ):
        works.append(
            Work(
                AttemptKey(RequestId(request), attempt),
                tuple(islice(rest, tokens)),
                start,
                tuple(map(BlockId, islice(rest, blocks))),
                _WANTED if sampled else None,
                LayerGroup(*layers) if layers else None,
            )
        )
    return Plan(tuple(works))


def _head(work: Work) -> list[Any]:
    layers = work.layers
    return [
        work.key.request_id,
        work.key.attempt,
        work.start,
        len(work.token_ids),
        len(work.block_ids),
        work.sample is not None,
        [layers.start, layers.stop, layers.of] if layers else None,
    ]
