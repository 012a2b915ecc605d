"""What the readers of a model's files share: JSON, and the errors they raise."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from core.errors import ConfigError, ModelUnsupported, Stage

Progress = Callable[[str], None]
"""Told one line before anything slow, such as a download."""


def bad_ref(ref: str, why: str) -> ConfigError:
    """ref: what model.ref says; why: what is wrong with it, and what to do."""
    return ConfigError(f"model.ref {ref!r}: {why}", stage=Stage.START, field="model.ref")


def unsupported(name: str, why: str) -> ModelUnsupported:
    """name: of the model; why: what is wrong with its files, and what to do if that helps."""
    return ModelUnsupported(
        f"model {name or '(unnamed)'}: {why}", stage=Stage.START, field="model.ref"
    )


def refuse(name: str, features: Mapping[str, bool]) -> None:
    """Raises ModelUnsupported naming the first of the features that is present."""
    for feature, present in features.items():
        if present:
            raise unsupported(name, f"it has {feature}, which is not supported")


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; {} when there is no such file.  Raises ModelUnsupported on damage."""
    try:
        value = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    except ValueError as error:
        why = f"{path.name} is not valid JSON ({error}); fetch it again"
        raise unsupported(path.parent.name, why) from error
    if not isinstance(value, dict):
        raise unsupported(path.parent.name, f"{path.name} does not hold an object; fetch it again")
    return value
