"""Into how many ranks a model can be split, and what one rank's share looks like.

Tensor parallelism as in Megatron-LM (Shoeybi et al., arXiv:1909.08053): attention is split by
heads, MLPs and experts along their intermediate dimension.  Imports no torch: the command line
refuses an impossible size before any process starts.
"""

from dataclasses import replace

from core.errors import ConfigError, Stage
from engine.model.config import ModelConfig


def part(total: int, rank: int, size: int) -> slice:
    """What rank `rank` of `size` has of `total` things in a row."""
    return slice(total * rank // size, total * (rank + 1) // size)


def working_sizes(config: ModelConfig) -> tuple[int, ...]:
    """Numbers of ranks that this model can be split into."""
    if config.qk_norm == "all":
        return (1,)
    whole = _split_evenly(config)
    return tuple(n for n in range(1, config.kv_heads + 1) if not any(w % n for w in whole))


def check_size(config: ModelConfig, size: int, field: str) -> None:
    """field: the setting that says `size`.  Raises ConfigError naming it and what works."""
    works = working_sizes(config)
    if size in works:
        return
    why = (
        "its norm spans the queries of all heads"
        if config.qk_norm == "all"
        else f"{config.heads} heads, {config.kv_heads} KV heads and its MLPs must split evenly"
    )
    raise ConfigError(
        f"{field}: {config.name} cannot be split into {size} ranks ({why}); "
        f"sizes that work: {', '.join(map(str, works))}",
        stage=Stage.START,
        field=field,
    )


def config_of_rank(config: ModelConfig, size: int) -> ModelConfig:
    """The model that each of `size` ranks runs, before its sums are taken over all of them.

    Never with tied embeddings: a rank embeds from the whole table and has a part of the head.
    """
    moe = config.moe and replace(
        config.moe,
        intermediate=config.moe.intermediate // size,
        shared_intermediate=config.moe.shared_intermediate // size,
    )
    return replace(
        config,
        heads=config.heads // size,
        kv_heads=config.kv_heads // size,
        intermediate=config.intermediate // size,
        tied_embeddings=False,
        moe=moe,
    )


def _split_evenly(config: ModelConfig) -> list[int]:
    """Dimensions that every rank has an equal part of."""
    whole = [config.heads, config.kv_heads]
    if len(config.moe_layers) < config.layers:
        whole.append(config.intermediate)
    if config.moe is not None:
        whole += [config.moe.intermediate, config.moe.shared_intermediate]
    return whole
