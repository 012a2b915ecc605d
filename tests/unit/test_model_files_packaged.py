"""Models that come inside Python packages, whole or in the parts that several packages carry."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from core.errors import ConfigError
from engine.model.refs import resolve

PARTS = {"tiny-part1": b"GGUF-", "tiny-part2": b"of two ", "tiny-part3": b"or three"}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages, and a home of our own for the cache."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


def install(
    site: Path, name: str, files: Mapping[str, bytes], requires: Sequence[str] = ()
) -> None:
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    lines = [f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {r}" for r in requires)]
    (info / "METADATA").write_text("\n".join(["Metadata-Version: 2.4", *lines, ""]))
    for path, content in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(content)
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in files))


def install_parts(site: Path, without: str = "", first: int = 0) -> None:
    requires = [f"{name}==1.0" for name in reversed(PARTS)] + ["absent; extra == 'docs'"]
    install(site, "tiny", {"tiny/__init__.py": b""}, requires)
    for number, (name, content) in enumerate(PARTS.items(), start=first):
        if name != without:
            install(site, name, {f"{name}/tiny-q8_0.gguf.part{number:02}": content})


def refusal() -> str:
    with pytest.raises(ConfigError) as caught:
        resolve("pypi:tiny")
    assert caught.value.field == "model.ref"
    return caught.value.message


def test_parts_are_put_together_in_order_and_only_once(site: Path) -> None:
    install_parts(site)
    lines: list[str] = []
    files = resolve("pypi:tiny", lines.append)
    assert files.path.read_bytes() == b"".join(PARTS.values())
    assert (files.kind, files.name) == ("gguf", "tiny")
    assert site not in files.path.parents
    written = files.path.stat().st_mtime_ns
    assert resolve("pypi:tiny", lines.append) == files
    assert files.path.stat().st_mtime_ns == written
    assert lines == ["putting tiny-q8_0.gguf together from 3 packages"]
    assert [p.name for p in files.path.parent.iterdir()] == ["tiny-q8_0.gguf"]


def test_a_file_of_another_size_is_put_together_again(site: Path) -> None:
    install_parts(site)
    path = resolve("pypi:tiny").path
    path.write_bytes(b"half")
    assert resolve("pypi:tiny").path.read_bytes() == b"".join(PARTS.values())


def test_several_may_put_it_together_at_once(site: Path) -> None:
    install_parts(site)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: resolve("pypi:tiny").path.read_bytes(), range(8)))
    assert set(found) == {b"".join(PARTS.values())}


def test_a_whole_file_is_used_where_it_lies(site: Path) -> None:
    install(site, "tiny", {"tiny/m.gguf": b"GGUF"})
    assert resolve("pypi:tiny").path == site / "tiny" / "m.gguf"


def test_a_missing_part_is_named(site: Path) -> None:
    install_parts(site, without="tiny-part2")
    assert "tiny-part2 is not installed; run `pip install tiny`" in refusal()


def test_parts_with_a_gap_are_refused(site: Path) -> None:
    install_parts(site, first=1)
    assert "do not follow" in refusal()


def test_a_file_that_is_gone_is_named(site: Path) -> None:
    install_parts(site)
    (site / "tiny-part3" / "tiny-q8_0.gguf.part02").unlink()
    assert "tiny-q8_0.gguf.part02 is gone; run `pip install --force-reinstall tiny`" in refusal()


def test_a_cache_that_cannot_be_written_says_so(site: Path) -> None:
    install_parts(site)
    (site.parent / "home").write_text("not a folder")
    assert "cannot be written" in refusal()
