"""Whatever is sent arrives equal; whatever is damaged is refused, never misread."""

import typing
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import InternalError
from core.ids import AttemptKey
from core.messages import Attach, Cancel, Hello, Prefill, Renew, Reserve
from core.sampling import Sampling
from transport.codec import MESSAGE_CLASSES, Envelope, ProtocolError, decode, encode
from transport.proto import worker_pb2
from transport.wire import seal, unseal

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
UINT32 = st.integers(0, (1 << 32) - 1)
UNSIGNED = ("tokens", "token_ids", "stop_token_ids", "token", "expert_counts")
SCALARS = {
    int: INT64,
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=40),
}


def of_hint(hint: typing.Any, name: str) -> st.SearchStrategy:
    hint = getattr(hint, "__supertype__", hint)
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return st.lists(of_hint(arguments[0], name), max_size=4).map(tuple)
    if arguments:
        return st.one_of(*(of_hint(a, name) for a in arguments))
    if hint is type(None):
        return st.none()
    if hint is int and name in UNSIGNED:
        return UINT32
    if hint in SCALARS:
        return SCALARS[hint]
    if hasattr(hint, "__members__"):
        return st.sampled_from(list(hint))
    return st.builds(hint, **{n: of_hint(h, n) for n, h in typing.get_type_hints(hint).items()})


messages = st.one_of(*(of_hint(kind, "") for kind in MESSAGE_CLASSES))
ids = st.integers(0, (1 << 64) - 1)
envelopes = st.builds(Envelope, messages, ids, ids)


@pytest.mark.parametrize("kind", MESSAGE_CLASSES, ids=lambda kind: kind.__name__)
def test_every_message_arrives_equal_and_of_the_same_types(kind):
    @settings(max_examples=30, deadline=None)
    @given(of_hint(kind, ""), ids, ids)
    def round_trip(message, call_id, reply_to):
        sent = Envelope(message, call_id, reply_to)
        got = unseal(seal(sent))
        assert got == sent
        assert repr(got) == repr(sent)

    round_trip()


@settings(max_examples=200, deadline=None)
@given(envelopes, st.data())
def test_a_frame_with_any_bit_flipped_or_cut_anywhere_is_refused(envelope, data):
    frame = seal(envelope)
    cut = data.draw(st.integers(0, len(frame) - 1))
    with pytest.raises(ProtocolError):
        unseal(frame[:cut])
    broken = bytearray(frame)
    broken[cut] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ProtocolError):
        unseal(bytes(broken))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_garbage_is_refused_or_read_but_never_another_error(data):
    for read in (decode, unseal):
        with suppress(ProtocolError):
            assert isinstance(read(data), Envelope)


KEY = AttemptKey("r", 1)
BAD = {
    "negative token": (Reserve(KEY, (-1,)), "Reserve"),
    "token beyond 32 bits": (Attach(KEY, "l", 1, 1 << 32, 1, Sampling()), "Attach"),
    "seed beyond 64 bits": (Prefill(KEY, (), Sampling(seed=1 << 70)), "Prefill"),
    "text for a number": (Cancel(AttemptKey("r", "one")), "Cancel"),
    "no key": (Cancel(None), "Cancel.key is None"),
    "keys that are none": (Renew((3,)), "Renew"),
    "text that is no unicode": (Hello(1, "\ud800", 0), "Hello"),
    "no message": ("hello", "str"),
}


@pytest.mark.parametrize(("message", "named"), BAD.values(), ids=BAD.keys())
def test_a_value_that_does_not_fit_is_an_internal_error_naming_the_message(message, named):
    with pytest.raises(InternalError, match=named) as caught:
        encode(Envelope(message))
    assert not isinstance(caught.value, ProtocolError)


UNREADABLE = {
    "no body": (worker_pb2.Envelope(id=1), "without a known body"),
    "no key": (worker_pb2.Envelope(cancel={}), "Cancel.key is missing"),
    "no nested fault": (
        worker_pb2.Envelope(attempt_failed={"key": {}}),
        "AttemptFailed.fault is missing",
    ),
    "unknown role": (worker_pb2.Envelope(worker_report={"role": "boss"}), "'boss' is no Role"),
    "unknown stage": (worker_pb2.Envelope(fault={"stage": "moon"}), "'moon' is no Stage"),
}


@pytest.mark.parametrize(("proto", "why"), UNREADABLE.values(), ids=UNREADABLE.keys())
def test_a_message_of_another_version_is_refused_by_name(proto, why):
    with pytest.raises(ProtocolError, match=why):
        decode(proto.SerializeToString())
