"""A model's shape from its files.  Imports no torch."""

from dataclasses import replace

from engine.model import ends, families
from engine.model.config import ModelConfig
from engine.model.gguf_header import read_header
from engine.model.reading import read_json
from engine.model.refs import ModelFiles


def load_config(files: ModelFiles) -> ModelConfig:
    """Raises ModelUnsupported when the model, or one of its files, cannot be used."""
    if files.kind == "gguf":
        return families.from_gguf(read_header(files.path), files.name)
    config = families.from_hf(read_json(files.path / "config.json"), files.name)
    return replace(config, eos_ids=ends.in_folder(files.path, config.eos_ids))
