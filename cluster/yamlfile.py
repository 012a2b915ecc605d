"""Settings written as YAML."""

import re
from pathlib import Path
from typing import Any

import yaml

from core.errors import ConfigError, Stage

_BOOL = "tag:yaml.org,2002:bool"


class _Loader(yaml.SafeLoader):
    """Only true and false are booleans, as in YAML 1.2: the key `on` of a fault is a word."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _BOOL]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, re.compile(r"^(?:true|false)$", re.IGNORECASE), list("tTfF"))


def read(name: str) -> dict[str, Any]:
    """The settings in a file; an empty one has none.  Raises ConfigError."""
    where = f"--config {name}"
    try:
        raw = parse(Path(name).read_text(encoding="utf-8"), where)
    except (OSError, UnicodeDecodeError) as error:
        raise _bad(where, str(error)) from None
    if not isinstance(raw, dict | None):
        raise _bad(where, f"expected settings by name, got {type(raw).__name__}")
    return raw or {}


def parse(text: str, where: str) -> Any:
    """Plain data.  Raises ConfigError that says where."""
    try:
        return yaml.load(text, _Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        raise _bad(where, str(error)) from None


def _bad(where: str, why: str) -> ConfigError:
    return ConfigError(f"{where}: {why}", stage=Stage.START, field="config")
