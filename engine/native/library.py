"""The compiled kernels, and the structures they read."""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int64, c_void_p
from pathlib import Path
from typing import Any

from engine.native.build import NativeUnavailable, build

FLOAT32, BFLOAT16, CODES8, CODES4 = range(4)
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


class Matrix(ctypes.Structure):
    """A packed weight matrix; see `engine.native.pack`."""

    _fields_ = [
        ("kind", c_int64),
        ("outputs", c_int64),
        ("depth", c_int64),
        ("group", c_int64),
        ("words", c_void_p),
        ("scales", c_void_p),
        ("mins", c_void_p),
    ]


class Context(ctypes.Structure):
    """What is the same for all layers of a step; see `engine.native.attention`."""

    _fields_ = [
        ("kv", c_void_p),
        ("bfloat16", c_int64),
        ("strides", c_int64 * 4),
        ("kv_heads", c_int64),
        ("block_size", c_int64),
        ("head_dim", c_int64),
        ("works", c_void_p),
        ("count", c_int64),
        ("tables", c_void_p),
        ("table_stride", c_int64),
        ("sharings", c_void_p),
        ("sharing_count", c_int64),
        ("members", c_void_p),
        ("scale", c_float),
    ]


class Library:
    """Functions over raw addresses: nothing is checked here.  They release the GIL, and share
    torch's OpenMP threads, which torch has loaded before."""

    def __init__(self, path: Path) -> None:
        """Raises NativeUnavailable."""
        try:
            loaded = ctypes.CDLL(str(path))
        except OSError as error:
            raise NativeUnavailable(f"cannot load {path} ({error}); remove it") from error
        address, number = c_void_p, c_int64
        parts, rows = [POINTER(Matrix), number], [address, number]
        strided = [address, number, number, number, number, number]
        self.lanes: int = _function(loaded, "lanes", [], number)()
        self.segment: int = _function(loaded, "segment", [], number)()
        self.linear = _function(loaded, "linear", [*parts, *rows, number, *rows, address, number])
        self.experts = _function(
            loaded,
            "experts",
            [
                *(POINTER(Matrix), *parts, *rows, number),
                *(address, address, number, number, address, number),
            ],
        )
        self.rms_norm = _function(loaded, "rms_norm", [*strided, address, c_float, address, number])
        self.rotate = _function(loaded, "rotate", [*strided, address, address, number])
        self.gated = _function(loaded, "gated", [*rows, number, number, number, address, number])
        self.attention = _function(
            loaded,
            "attention",
            [POINTER(Context), number, number, number, *rows, *rows, *rows, address, number],
        )

    @property
    def columns(self) -> int:
        """Outputs in a panel."""
        return 2 * self.lanes


def open_library(cache: Path | None = None, extra: Sequence[str] = ()) -> Library:
    """Compiled for this machine if it is not yet.  Raises NativeUnavailable; see `build`."""
    return Library(build(cache, extra))


def _function(loaded: ctypes.CDLL, name: str, takes: list[Any], gives: Any = None) -> Any:
    function = getattr(loaded, f"trireme_{name}")
    function.argtypes, function.restype = takes, gives
    return function
