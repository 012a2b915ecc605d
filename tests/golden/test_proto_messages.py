"""`worker.proto` mirrors `core.messages`, and the committed code mirrors `worker.proto`."""

import shutil
import types
import typing
from dataclasses import fields, is_dataclass
from enum import StrEnum

import pytest
from google.protobuf.descriptor import FieldDescriptor as F

from core import messages, sampling
from core.ids import AttemptKey
from core.kvlayout import Compatibility, KVLayout
from transport.codec import MESSAGE_CLASSES, body_name
from transport.proto import generate, worker_pb2

PROTO = worker_pb2.DESCRIPTOR.message_types_by_name
NUMBERS = {int: (F.TYPE_INT64, F.TYPE_UINT32), float: (F.TYPE_DOUBLE,), bool: (F.TYPE_BOOL,)}
TEXTS = {str: (F.TYPE_STRING,), bytes: (F.TYPE_BYTES,)}
CLASSES = [
    AttemptKey,
    Compatibility,
    KVLayout,
    *(
        c
        for module in (messages, sampling)
        for c in vars(module).values()
        if is_dataclass(c) and c.__module__ == module.__name__
    ),
]


def shape(kind: type) -> list[tuple[str, bool, bool, object]]:
    """(name, repeated, optional, scalar types or message name) of each field, in order."""
    return [(name, *of_hint(hint)) for name, hint in typing.get_type_hints(kind).items()]


def of_hint(hint: object) -> tuple[bool, bool, object]:
    hint = getattr(hint, "__supertype__", hint)
    if typing.get_origin(hint) is tuple:
        return (True, False, of_hint(typing.get_args(hint)[0])[2])
    if typing.get_origin(hint) is types.UnionType:
        return (False, True, of_hint(typing.get_args(hint)[0])[2])
    if issubclass(hint, StrEnum):
        return (False, False, TEXTS[str])
    return (False, False, (NUMBERS | TEXTS).get(hint, hint.__name__))


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_class_has_the_same_fields_in_the_proto(kind):
    assert kind.__name__ in PROTO
    proto = PROTO[kind.__name__].fields
    expected = shape(kind)
    assert [f.name for f in proto] == [name for name, *_ in expected]
    for field, (name, repeated, optional, carried) in zip(proto, expected, strict=True):
        assert field.is_repeated == repeated, name
        assert (field.containing_oneof is not None) == optional, name
        if isinstance(carried, str):
            assert field.message_type.name == carried, name
        else:
            assert field.type in carried, name


def test_the_proto_has_no_message_besides():
    assert set(PROTO) == {kind.__name__ for kind in CLASSES} | {"Frame", "Envelope"}


def test_the_envelope_carries_exactly_the_messages_of_the_union():
    body = PROTO["Envelope"].oneofs_by_name["body"].fields
    assert {f.name: f.message_type.name for f in body} == {
        body_name(kind): kind.__name__ for kind in MESSAGE_CLASSES
    }
    assert len(MESSAGE_CLASSES) == 15


def test_the_union_is_what_core_says_travels():
    unions = (messages.Call, messages.Reply, messages.Notice, messages.Event)
    assert set(MESSAGE_CLASSES) == {kind for union in unions for kind in typing.get_args(union)}
    assert all(is_dataclass(kind) and fields(kind) for kind in MESSAGE_CLASSES)


def test_field_numbers_never_change():
    """Two releases meet while a cluster is upgraded; Hello and Fault must stay readable."""
    numbers = {name: [f.number for f in PROTO[name].fields] for name in ("Hello", "Fault")}
    assert numbers == {"Hello": [1, 2, 3, 4, 5], "Fault": [1, 2, 3, 4, 5, 6]}
    envelope = PROTO["Envelope"].fields_by_name
    assert [envelope[n].number for n in ("id", "reply_to", "hello", "welcome", "fault")] == [
        *(1, 2, 10, 11, 12)
    ]


def test_the_committed_code_is_what_the_proto_generates():
    assert generate.main(["--check"]) == 0


def test_check_finds_a_stale_file(tmp_path, monkeypatch, capsys):
    for path in (generate.PROTO, *generate.OUTPUTS):
        (tmp_path / path.parent).mkdir(parents=True, exist_ok=True)
        shutil.copy(generate.ROOT / path, tmp_path / path)
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    assert generate.main(["--check"]) == 0
    stub = tmp_path / generate.OUTPUTS[1]
    stub.write_text(stub.read_text() + "\n")
    assert generate.main(["--check"]) == 1
    assert "worker_pb2.pyi" in capsys.readouterr().err
    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 0


def test_an_unknown_flag_is_refused(capsys):
    assert generate.main(["--chekc"]) == 2
    assert "usage" in capsys.readouterr().err
