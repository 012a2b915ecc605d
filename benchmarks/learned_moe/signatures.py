"""Which experts a text uses: its signature, and how well signatures tell domains apart."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3MoeForCausalLM

Centroids: TypeAlias = dict[str, list[list[float]]]
"""Domain -> layer -> share of each expert: the mean signature of texts that were trained on."""
_FILE = "signatures.json"


@torch.inference_mode()
def of(model: Qwen3MoeForCausalLM, texts: Tensor) -> Tensor:
    """texts [texts, length] int64 -> [texts, layers, experts]: the share of each expert in the
    choices of a layer; sums to 1 over experts."""
    top_k, experts = model.config.num_experts_per_tok, model.config.num_experts
    routers = model(texts, output_router_logits=True).router_logits
    chosen = torch.stack([logits.topk(top_k).indices for logits in routers], 1)
    counts = F.one_hot(chosen, experts).sum(2)
    shares: Tensor = counts.view(*texts.shape, -1, experts).sum(1) / (texts.shape[1] * top_k)
    return shares


def classify(found: Tensor, centroids: Centroids) -> list[str]:
    """The domain with the nearest centroid, by cosine; found [texts, layers, experts]."""
    names, shares = list(centroids), torch.tensor(list(centroids.values()))
    return [names[i] for i in (_unit(found) @ _unit(shares).T).argmax(1)]


def accuracy(found: Mapping[str, Tensor], centroids: Centroids) -> float:
    """Share of all texts that are nearest to their own domain's centroid."""
    right = [name == n for name, f in found.items() for n in classify(f, centroids)]
    return sum(right) / len(right)


def cosines(found: Mapping[str, Tensor]) -> list[list[float]]:
    """[domains, domains]: mean cosine of two texts' signatures; no text is paired with itself."""
    units = [_unit(f) for f in found.values()]
    return [[_mean_cosine(a, b, a is b) for b in units] for a in units]


def write(centroids: Centroids, folder: Path) -> None:
    rounded = {
        name: [[round(share, 5) for share in layer] for layer in layers]
        for name, layers in centroids.items()
    }
    (folder / _FILE).write_text(json.dumps(rounded) + "\n", "utf-8")


def read(folder: Path) -> Centroids:
    centroids: Centroids = json.loads((folder / _FILE).read_text("utf-8"))
    return centroids


def _mean_cosine(a: Tensor, b: Tensor, same: bool) -> float:
    """a, b: rows of length 1; those of one set with itself have a diagonal of ones."""
    total, pairs = (a @ b.T).sum().item(), len(a) * len(b)
    return (total - len(a)) / (pairs - len(a)) if same else total / pairs


def _unit(found: Tensor) -> Tensor:
    """[n, layers, experts] -> [n, layers * experts] of length 1."""
    return F.normalize(found.flatten(1), dim=1)
