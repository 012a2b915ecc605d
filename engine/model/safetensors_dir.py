"""The tensors of a Hugging Face folder: one safetensors file, or shards listed in an index."""

import struct
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.model.reading import read_json, unsupported

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def read_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor in its stored dtype) of all files.  Raises ModelUnsupported on damage."""
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - no mapping, keys() is all it has
                    yield name, file.get_tensor(name)
        except SafetensorError as error:
            raise _damaged(path, str(error)) from error


def weight_files(folder: Path) -> list[Path]:
    """The files that make up the model.  Raises ModelUnsupported when they are not all there."""
    shards = set(read_json(folder / INDEX).get("weight_map", {}).values())
    if not shards:
        single = folder / SINGLE
        shards = {single.name} if single.is_file() else {p.name for p in _safetensors(folder)}
    missing = sorted(name for name in shards if not (folder / name).is_file())
    if missing:
        why = f"the files {', '.join(missing)} are not there; finish the download"
        raise unsupported(folder.name, why)
    return [folder / name for name in sorted(shards)]


def _safetensors(folder: Path) -> list[Path]:
    """The only such file, whatever its name; several without an index would be a guess."""
    found = list(folder.glob("*.safetensors"))
    if len(found) != 1:
        why = f"it has {len(found)} safetensors files, none called {SINGLE}, and no {INDEX}"
        raise unsupported(folder.name, why)
    return found


def header_bytes(path: Path) -> bytes:
    """The JSON at the head of a safetensors file; its tensors start 8 + len(this) bytes in."""
    with path.open("rb") as file:
        size = file.read(8)
        header = file.read(struct.unpack("<Q", size)[0]) if len(size) == 8 else b""
    if not header.startswith(b"{"):
        raise _damaged(path, "it has no header")
    return header


def _damaged(path: Path, why: str) -> Exception:
    return unsupported(path.parent.name, f"{path.name} is damaged ({why}); fetch it again")
