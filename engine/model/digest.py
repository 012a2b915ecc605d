"""One number for a model's weights, so that two workers can tell whether their KV is compatible."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

from engine.model.config_file import load_config
from engine.model.gguf_file import ggml_type, stored_bytes
from engine.model.gguf_header import read_header
from engine.model.refs import ModelFiles
from engine.model.safetensors_dir import header_bytes, weight_files

_SAMPLE = 8192
"""Bytes read at either end of each tensor."""
_ROUTERS = (".gate.weight", ".shared_expert_gate.weight", ".ffn_gate_inp.weight")
"""Matrices that are never rounded: what chooses experts."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A tensor as it lies in a file; kind: its stored type."""

    name: str
    kind: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    size: int


def model_digest(files: ModelFiles) -> str:
    """128 bits in hex over the model's shape and, of each tensor in order of names, its name,
    type, shape and the first and last 8 KiB of its bytes.

    Reads a few MB of a model of any size.  Paths, file names, sharding and time stamps do not
    count, so machines with equal weights agree; the same weights in another format or
    quantisation differ.  It tells models apart; it does not prove that a download is intact.
    """
    config = replace(load_config(files), name="", bos_id=None, eos_ids=())
    digest = blake2b(repr(config).encode(), digest_size=16)
    for piece in sorted(_pieces(files), key=lambda p: p.name):
        digest.update(repr((piece.name, piece.kind, piece.shape, piece.size)).encode())
        with piece.path.open("rb") as file:
            file.seek(piece.offset)
            digest.update(file.read(min(piece.size, _SAMPLE)))
            tail = min(max(piece.size - _SAMPLE, 0), _SAMPLE)
            file.seek(piece.offset + piece.size - tail)
            digest.update(file.read(tail))
    return digest.hexdigest()


def matrix_types(files: ModelFiles) -> set[str]:
    """How the files store the matrices that a worker may keep in another format: "F32", "BF16",
    "Q4_K", …  Reads headers only."""
    pieces = _pieces(files)
    return {p.kind for p in pieces if len(p.shape) > 1 and not p.name.endswith(_ROUTERS)}


def _pieces(files: ModelFiles) -> Iterator[_Piece]:
    return _gguf_pieces(files) if files.kind == "gguf" else _hf_pieces(files)


def _gguf_pieces(files: ModelFiles) -> Iterator[_Piece]:
    for t in read_header(files.path).tensors.values():
        size = stored_bytes(t, files.name)
        kind = ggml_type(t, files.name).name
        yield _Piece(t.name, kind, t.shape, files.path, t.offset, size)


def _hf_pieces(files: ModelFiles) -> Iterator[_Piece]:
    for path in weight_files(files.path):
        header = header_bytes(path)
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        for name, entry in entries.items():
            first, end = (8 + len(header) + at for at in entry["data_offsets"])
            yield _Piece(name, entry["dtype"], tuple(entry["shape"]), path, first, end - first)
