"""Typed reading of one untrusted JSON object; every error names the field.  Pure.

null counts as absent, as in the OpenAI API.  A boolean is never a number.
"""

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from reprlib import repr as short
from typing import TypeVar

from core.errors import BadRequest

D = TypeVar("D")

_NAMES = {
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    list: "an array",
    dict: "an object",
    type(None): "null",
}
_SHOWN_CHARS = 64


class Fields:
    """One JSON object, found at `path` of the request body ("" is the body itself)."""

    def __init__(self, raw: object, path: str = "") -> None:
        """Raises BadRequest when `raw` is not an object."""
        self._path = path
        if not isinstance(raw, dict):
            raise wrong(path, "an object", raw)
        self._raw: dict[str, object] = raw

    def path(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def get(self, name: str) -> object:
        return self._raw.get(name)

    def required(self, name: str) -> object:
        value = self._raw.get(name)
        if value is None:
            raise bad(self.path(name), "is required")
        return value

    def only(self, known: Collection[str]) -> None:
        """Raises BadRequest on a field that is not among `known`, with a suggestion."""
        for name in self._raw:
            if name not in known:
                shown = name[:_SHOWN_CHARS]
                near = get_close_matches(shown, known, n=1)
                hint = f"; did you mean {near[0]}?" if near else "; leave it out"
                raise bad(self.path(shown), "is not a known field" + hint)

    def refuse(self, neutral: Mapping[str, Sequence[object]]) -> None:
        """Raises BadRequest on a field of `neutral` with a value other than those it lists."""
        for name, allowed in neutral.items():
            value = self.get(name)
            same = (type(value) is type(a) and value == a for a in allowed)
            if value is not None and not any(same):
                raise bad(self.path(name), f"= {short(value)} is not supported; leave it out")

    def text(self, name: str, most: int) -> str:
        """A string of at most `most` characters; "" when absent."""
        value = self.get(name)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise wrong(self.path(name), "a string", value)
        if len(value) > most:
            raise bad(self.path(name), f"has {len(value)} characters; the most is {most}")
        return value

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise wrong(self.path(name), "a boolean", value)
        return value

    def integer(self, name: str, default: D, low: int, high: int) -> int | D:
        value = self.get(name)
        return default if value is None else integer(value, self.path(name), low, high)

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self.get(name)
        return default if value is None else number(value, self.path(name), low, high)

    def array(self, name: str, most: int) -> list[object]:
        """An array of at most `most` items; empty when absent."""
        value = self.get(name)
        return [] if value is None else array(value, self.path(name), most)

    def mapping(self, name: str, most: int) -> dict[str, object]:
        """An object of at most `most` keys; empty when absent."""
        value = self.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise wrong(self.path(name), "an object", value)
        if len(value) > most:
            raise bad(self.path(name), f"has {len(value)} keys; the most is {most}")
        return value


def integer(value: object, path: str, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise wrong(path, "an integer", value)
    if not low <= value <= high:
        raise bad(path, f"= {short(value)} is not within {low} and {high}")
    return value


def number(value: object, path: str, low: float, high: float) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise wrong(path, "a number", value)
    if not low <= value <= high:
        raise bad(path, f"= {short(value)} is not within {low:g} and {high:g}")
    return float(value)


def array(value: object, path: str, most: int) -> list[object]:
    if not isinstance(value, list):
        raise wrong(path, "an array", value)
    if len(value) > most:
        raise bad(path, f"has {len(value)} items; the most is {most}")
    return value


def bad(path: str, why: str) -> BadRequest:
    return BadRequest(f"{path} {why}" if path else why, field=path)


def wrong(path: str, expected: str, value: object) -> BadRequest:
    got = _NAMES.get(type(value), type(value).__name__)
    return bad(path, f"{'must' if path else 'the body must'} be {expected}, not {got}")
