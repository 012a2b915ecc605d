"""Command-line flags from the `ClusterSpec` tree: one per setting, plus a few short forms.

Order of precedence: flag, then file, then default.  Everything ends in `from_mapping`, so a
flag and a file are checked by the same code and an error names the same key.
"""

import argparse
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from typing import Any

from core.errors import ConfigError, Stage
from core.messages import Role
from core.spec import ClusterSpec, from_mapping

SHORT = {"model": "model.ref", "host": "http.host", "port": "http.port"}
"""Short flag -> setting."""

_DEST = "set:"


@dataclass(frozen=True, slots=True)
class Setting:
    """One leaf of the tree: dotted path, type, default, and what --help says."""

    path: str
    hint: Any
    default: Any
    doc: str


def settings(kind: type = ClusterSpec, prefix: str = "") -> Iterator[Setting]:
    """All settings that fit one flag.  Pools have flags of their own."""
    hints = typing.get_type_hints(kind)
    for field in fields(kind):
        path, hint = f"{prefix}{field.name}", hints[field.name]
        if is_dataclass(hint) and isinstance(hint, type):
            yield from settings(hint, f"{path}.")
        elif path != "pools":
            yield Setting(path, hint, _default(field), field.metadata.get("doc", ""))


def add_to(parser: argparse.ArgumentParser) -> None:
    """The flags of `trireme serve` that make the spec."""
    common = parser.add_argument_group("common")
    common.add_argument("--config", metavar="FILE", help="YAML file with any of the settings below")
    common.add_argument("--model", metavar="REF", dest=_DEST + SHORT["model"], help=_doc("model"))
    common.add_argument("--host", metavar="HOST", dest=_DEST + SHORT["host"], help=_doc("host"))
    common.add_argument(
        "--port", metavar="PORT", type=int, dest=_DEST + SHORT["port"], help=_doc("port")
    )
    pools = parser.add_argument_group(
        "workers",
        "What you name replaces the default of one prefill and one decode worker; "
        "--prefill or --decode alone brings one worker of the other kind.",
    )
    for role in Role:
        pools.add_argument(
            f"--{role}", type=int, metavar="N", default=None, help=f"number of {role} workers"
        )
    pools.add_argument(
        "--tensor-parallel",
        type=int,
        metavar="N",
        default=None,
        help="ranks (processes or devices) that each worker of every pool is made of",
    )
    group = parser.add_argument_group(
        "all settings", "the same names as in the file: `kv: {block_size: 32}`"
    )
    for setting in settings():
        group.add_argument(
            f"--{setting.path}",
            dest=_DEST + setting.path,
            help=f"{setting.doc} (default: {_shown(setting.default)})".replace("%", "%%"),
            **_kind(setting.hint),
        )


def to_spec(args: argparse.Namespace) -> ClusterSpec:
    """Raises ConfigError naming the key that is unknown or has a bad value."""
    raw = _read(args.config) if args.config else {}
    given = {k.removeprefix(_DEST): v for k, v in vars(args).items() if k.startswith(_DEST)}
    for path, value in given.items():
        if value is not None:
            _put(raw, path, value)
    counts = {role: getattr(args, role) for role in Role if getattr(args, role) is not None}
    if counts:
        raw["pools"] = _pools(counts)
    spec = from_mapping(ClusterSpec, raw)
    if args.tensor_parallel is None:
        return spec
    pools = tuple(replace(pool, tensor_parallel=args.tensor_parallel) for pool in spec.pools)
    return replace(spec, pools=pools)


def _pools(counts: Mapping[Role, int]) -> list[dict[str, object]]:
    whole = dict(counts)
    if len(whole) == 1 and Role.HYBRID not in whole:
        whole = {Role.PREFILL: 1, Role.DECODE: 1} | whole
    return [{"role": str(role), "replicas": count} for role, count in whole.items()]


def _put(raw: dict[str, Any], path: str, value: object) -> None:
    *parents, leaf = path.split(".")
    for name in parents:
        below = raw.setdefault(name, {})
        if not isinstance(below, dict):
            raise ConfigError(f"{name}: expected a mapping", stage=Stage.START, field=name)
        raw = below
    raw[leaf] = value


def _read(name: str) -> dict[str, Any]:
    from cluster import yamlfile  # here: --help need not wait for YAML

    return yamlfile.read(name)


def _parse_yaml(text: str) -> Any:
    from cluster import yamlfile

    return yamlfile.parse(text, text)


def _kind(hint: Any) -> dict[str, Any]:
    """How argparse reads a value of this type.  Literals are checked by `from_mapping`."""
    if typing.get_origin(hint) is typing.Literal:
        return {"metavar": "{" + ",".join(typing.get_args(hint)) + "}"}
    if typing.get_origin(hint) is tuple:
        return {"type": _parse_yaml, "metavar": "YAML"}
    if hint is bool:
        return {"type": _bool, "metavar": "{true,false}"}
    return {"type": hint, "metavar": hint.__name__.upper()}


def _bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


def _default(field: Field[Any]) -> Any:
    return None if field.default is MISSING else field.default


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    return str(default) if default not in ("", ()) else "empty"


def _doc(short: str) -> str:
    path = SHORT[short]
    return f"{next(s.doc for s in settings() if s.path == path)}; short for --{path}"
