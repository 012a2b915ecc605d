"""The wire format of the data plane: what goes in comes out, and nothing else ever does."""

import string

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given

from core.errors import TransferFailed
from core.ids import Epoch, LeaseId
from core.ports import MoveState
from transport import frame as frames
from transport.frame import Answer, Frame, Kind

u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)


@st.composite
def some_frames(draw: st.DrawFn) -> Frame:
    n = draw(st.integers(1, 40))
    return Frame(
        draw(st.sampled_from(Kind)),
        draw(u64),
        LeaseId(draw(st.text(string.printable, max_size=64))),
        Epoch(draw(u64)),
        draw(u64),
        draw(u32),
        tuple(draw(st.lists(u32, min_size=n, max_size=n))),
        tuple(draw(st.lists(u64, min_size=n, max_size=n))),
        tuple(draw(st.lists(u64, min_size=n, max_size=n))) if draw(st.booleans()) else (),
        draw(u64),
    )


def parse(data: bytes) -> Frame:
    prefix, body = data[: frames.PREFIX_BYTES], data[frames.PREFIX_BYTES :]
    frames.body_bytes(prefix)
    return frames.decode(prefix, body)


def parse_answer(data: bytes) -> Answer:
    return frames.decode_answer(data[: frames.ANSWER_BYTES], data[frames.ANSWER_BYTES :])


@given(some_frames())
def test_a_frame_survives_the_wire_and_says_how_long_it_is(frame: Frame) -> None:
    data = frames.encode(frame)
    assert frames.body_bytes(data[: frames.PREFIX_BYTES]) == len(data) - frames.PREFIX_BYTES
    assert parse(data) == frame


@given(some_frames(), st.data())
def test_a_frame_with_any_bit_flipped_is_refused(frame: Frame, data: st.DataObject) -> None:
    raw = bytearray(frames.encode(frame))
    bit = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(TransferFailed, match="bad frame"):
        parse(bytes(raw))


@given(some_frames(), st.data())
def test_a_frame_cut_or_extended_is_refused(frame: Frame, data: st.DataObject) -> None:
    raw = frames.encode(frame)
    size = data.draw(st.integers(0, len(raw) + 32))
    assume(size != len(raw))
    with pytest.raises(TransferFailed, match="bad frame"):
        parse(raw[:size] + bytes(max(0, size - len(raw))))


@given(st.binary(max_size=400))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(TransferFailed, match="bad frame"):
        parse(data)
    with pytest.raises(TransferFailed, match="bad frame"):
        parse_answer(data)


@given(some_frames(), some_frames())
def test_the_body_of_another_frame_is_refused(one: Frame, other: Frame) -> None:
    first, second = frames.encode(one), frames.encode(other)
    assume(first[: frames.PREFIX_BYTES] != second[: frames.PREFIX_BYTES])
    with pytest.raises(TransferFailed):
        parse(first[: frames.PREFIX_BYTES] + second[frames.PREFIX_BYTES :])


@pytest.mark.parametrize(
    "changed",
    [
        {"block_ids": (), "generations": ()},
        {"block_ids": tuple(range(1025)), "generations": (0,) * 1025},
        {"generations": (1,)},
        {"sums": (1,)},
        {"lease_id": "x" * 65},
        {"lease_id": "ü" * 33},
        {"epoch": -1},
        {"epoch": 2**64},
        {"first_index": 2**32},
        {"block_ids": (1, 2**32)},
        {"block_ids": (1, -1)},
        {"generations": (1, 2**64)},
        {"layout": -1},
    ],
    ids=str,
)
def test_what_does_not_fit_is_not_encoded(changed: dict[str, object]) -> None:
    good: dict[str, object] = {
        "kind": Kind.BLOCKS,
        "sequence": 1,
        "lease_id": LeaseId("lease"),
        "epoch": Epoch(1),
        "layout": 2,
        "first_index": 0,
        "block_ids": (1, 2),
        "generations": (3, 4),
    }
    frames.encode(Frame(**good))  # type: ignore[arg-type]
    with pytest.raises(TransferFailed, match="bad frame"):
        frames.encode(Frame(**(good | changed)))  # type: ignore[arg-type]


def test_the_largest_frame_fits_its_own_limit() -> None:
    n = frames.MAX_BLOCKS
    largest = Frame(
        Kind.BLOCKS, 1, LeaseId("x" * 64), Epoch(1), 1, 0, (1,) * n, (2,) * n, (3,) * n, 2**64 - 1
    )
    assert parse(frames.encode(largest)) == largest


answers = st.builds(Answer, u64, st.sampled_from(MoveState), st.text(string.printable, max_size=99))


@given(answers)
def test_an_answer_survives_the_wire_and_says_how_long_it_is(answer: Answer) -> None:
    data = frames.encode_answer(answer)
    head = data[: frames.ANSWER_BYTES]
    assert frames.reason_bytes(head) == len(data) - frames.ANSWER_BYTES
    assert parse_answer(data) == answer


@given(answers, st.data())
def test_an_answer_with_any_bit_flipped_or_cut_is_refused(
    answer: Answer, data: st.DataObject
) -> None:
    raw = bytearray(frames.encode_answer(answer))
    bit = data.draw(st.integers(0, len(raw) * 8 - 1))
    size = data.draw(st.integers(0, len(raw) - 1))
    cut = bytes(raw[:size])
    raw[bit // 8] ^= 1 << bit % 8
    for damaged in (bytes(raw), cut):
        with pytest.raises(TransferFailed, match="bad frame"):
            parse_answer(damaged)


@given(st.text(max_size=2000))
def test_a_long_reason_is_cut_and_still_read(reason: str) -> None:
    reason = reason.encode(errors="ignore").decode()
    data = frames.encode_answer(Answer(1, MoveState.FAILED, reason))
    assert len(data) <= frames.ANSWER_BYTES + frames.MAX_REASON_BYTES
    assert parse_answer(data).reason[:100] == reason[:100]
