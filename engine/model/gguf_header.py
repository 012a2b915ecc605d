"""The header of a GGUF file: metadata and tensor table.  Standard library only, no tensor is read.

A parser of our own because the one in the `gguf` package builds numpy views around every string:
5 s for a vocabulary of 49k tokens, against 0.1 s here.  Format: docs/gguf.md of ggml.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from core.errors import ModelUnsupported, Stage

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = dict(enumerate("BbHhIif?")) | dict(enumerate("Qqd", start=10))
"""GGUF value type -> struct format."""
_FLOAT32 = 0
"""`GGML_TYPE_F32`."""
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One entry of the tensor table.

    shape: elements per dimension, outermost first (torch's order); offset: bytes from the start of
    the file; type_id: `ggml_type`.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """metadata: plain Python values by key; tensors: by name, in file order."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_header(path: Path) -> GgufHeader:
    """Raises ModelUnsupported when `path` is no complete GGUF file of version 2 or 3."""
    with path.open("rb") as file:
        if path.stat().st_size < 24:
            raise _broken(path, "it is too short")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Parser(path, data).header()
            except (struct.error, ValueError, TypeError, OverflowError, RecursionError) as error:
                raise _broken(path, f"its header is damaged ({error})") from error


def read_floats(header: GgufHeader, name: str, count: int) -> tuple[float, ...]:
    """The values of a small tensor.  Raises ModelUnsupported when it is not `count` float32."""
    tensor, layout = header.tensors[name], struct.Struct(f"<{count}f")
    with header.path.open("rb") as file:
        file.seek(tensor.offset)
        raw = file.read(layout.size)
    if (tensor.type_id, tensor.elements, len(raw)) != (_FLOAT32, count, layout.size):
        raise _broken(header.path, f"its tensor {name} does not hold {count} floats")
    return layout.unpack(raw)


def _broken(path: Path, why: str) -> ModelUnsupported:
    return ModelUnsupported(
        f"{path.name} is not a usable GGUF file: {why}; fetch it again, or give another model",
        stage=Stage.START,
        field="model.ref",
    )


class _Parser:
    """A cursor over the mapped file.  Reading past the end raises struct.error."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0

    def header(self) -> GgufHeader:
        magic, version = self._data[:4], self._unpack("4xI")[0]
        if magic != _MAGIC or version not in _VERSIONS:
            raise _broken(self._path, f"its first bytes are {magic!r}, version {version}")
        tensor_count, value_count = self._unpack("QQ")
        metadata: dict[str, Any] = {}
        for _ in range(value_count):
            key = self._string()
            metadata[key] = self._value(self._unpack("I")[0])
        entries = [self._entry() for _ in range(tensor_count)]
        alignment = int(metadata.get("general.alignment", 32))
        if alignment < 1:
            raise _broken(self._path, f"its alignment is {alignment}")
        start = -(-self._at // alignment) * alignment
        tensors = {
            name: GgufTensor(name, shape, type_id, start + offset)
            for name, shape, type_id, offset in entries
        }
        return GgufHeader(self._path, metadata, tensors)

    def _unpack(self, form: str) -> tuple[Any, ...]:
        layout = struct.Struct(f"<{form}")
        values = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return values

    def _string(self) -> str:
        start = self._at + _LENGTH.size
        self._at = start + _LENGTH.unpack_from(self._data, self._at)[0]
        if self._at > len(self._data):
            raise struct.error("a string reaches past the end of the file")
        return str(self._data[start : self._at], "utf-8")

    def _value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self._string()
        if type_id == _ARRAY:
            return self._array(*self._unpack("IQ"))
        if type_id not in _SCALARS:
            raise _broken(self._path, f"its header has a value of unknown type {type_id}")
        return self._unpack(_SCALARS[type_id])[0]

    def _array(self, type_id: int, count: int) -> list[Any]:
        if type_id in _SCALARS:
            return list(self._unpack(f"{count}{_SCALARS[type_id]}"))
        return [self._value(type_id) for _ in range(count)]

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (dimensions,) = self._unpack("I")
        shape = self._unpack(f"{dimensions}Q")
        type_id, offset = self._unpack("IQ")
        return name, shape[::-1], type_id, offset
