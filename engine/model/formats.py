"""How a worker keeps its matrices, and what that is called where KV or answers depend on it.

A format counts by the values it stands for, not by its bytes: "exact" is the values of the
model's files, whether they lie there as float32, as the file's own codes, or as bfloat16 that the
file has too.  KV of equal values may be shared; see docs/decisions/0008-weight-formats.md.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

from core.errors import ConfigError, Stage
from core.spec import ClusterSpec
from engine.model.digest import matrix_types
from engine.model.refs import ModelFiles

Storage: TypeAlias = Literal["float32", "bfloat16", "int8", "gguf"]
"""float32, bfloat16: dense.  int8: rounded to codes.  gguf: the file's own codes."""

EXACT = "exact"


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """values: whose KV this worker's may be mixed with, EXACT or a name.

    lossy: "" when answers are those of the model's files in the type of computation.
    """

    storage: Storage
    values: str
    lossy: str


def choose(spec: ClusterSpec, pool: int, dtype: str, files: ModelFiles) -> WeightFormat:
    """The format of spec.pools[pool].  dtype: of the computation, resolved.

    Raises ConfigError for "gguf" without a GGUF file.
    """
    storages = [_storage(p.weights or spec.weights.dtype, dtype) for p in spec.pools]
    own = storages[pool]
    if own == "gguf" and files.kind != "gguf":
        raise ConfigError(
            f"weights.dtype: gguf keeps the codes of a GGUF file, and {files.name} is none; "
            "choose another, or give a GGUF file",
            stage=Stage.START,
            field="weights.dtype",
        )
    used = {s for s, p in zip(storages, spec.pools, strict=True) if p.replicas}
    names = sorted({_values(storage, files) for storage in used})
    shared = spec.weights.share_kv and len(names) > 1
    values = f"shared({'+'.join(names)})" if shared else _values(own, files)
    return WeightFormat(own, values, "" if values in (EXACT, dtype) else f"weights={values}")


def _storage(wanted: str, dtype: str) -> Storage:
    return cast(Storage, dtype if wanted == "auto" else wanted)


def _values(storage: Storage, files: ModelFiles) -> str:
    rounds = storage == "int8" or (storage == "bfloat16" and matrix_types(files) != {"BF16"})
    return storage if rounds else EXACT
