"""A slice of Flash: true widths, few layers; its random weights, and what its caches hold before a timed step.

All numbers are BF16 numbers, so that every numerics and the peer start from the same ones.

Legend: M layers that have a family, B requests, N rows of a request, C columns.
"""

import random
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from ..layouts.pages import page_families
from ..models.checkpoint.hold import quantise_weights
from ..models.checkpoint.names import TensorSpec, held_table
from ..models.checkpoint.share import RankWeights, held_dtype
from ..models.numerics import BFLOAT16, Numerics
from ..models.v4.caches import Caches
from ..models.v4.config import V4Config, flash, tiny
from ..models.v4.indexer import quantise_keys
from ..models.v4.model import Model
from ..models.v4.pools import family_layers, row_form
from ..parallel.topology import Topology

LAYERS = (0, 4, 128, 4)
EXPERTS, VOCABULARY = 16, 4096

NEAR_ONE, FREE = ("norm.weight", "_scale"), ("attn_sink", "ape", "_base", "embed.weight")
"""Ends of names: numbers around 1, and numbers of size 1. Everything else is a product's, scaled by its inputs."""


def flash_slice(layers: tuple[int, ...] = LAYERS) -> V4Config:
    """Flash with these layers, 16 experts of which a row takes 6, and 4,096 tokens.

    The first layer routes by hash, as the first ones of Flash do; the others choose their experts themselves.
    """
    return replace(
        flash(),
        num_hidden_layers=len(layers),
        compress_ratios=layers,
        draft_ratios=(),
        n_routed_experts=EXPERTS,
        vocab_size=VOCABULARY,
        num_hash_layers=1,
    )


def tiny_slice(layers: tuple[int, ...] = LAYERS) -> V4Config:
    """The same at test size."""
    return replace(tiny(), num_hidden_layers=len(layers), compress_ratios=layers)


CASES: Mapping[str, Callable[[tuple[int, ...]], V4Config]] = {"slice": flash_slice, "tiny": tiny_slice}


def slice_weights(config: V4Config, seed: int) -> RankWeights:
    """Random weights of one rank, in the dtypes of BF16; every number is one of BF16.

    w1 and w3 of the experts are views of one tensor, as the peer wants them: neither side needs a copy. Experts have
    the same numbers in other places, since drawing them takes longest.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, specs in held_table(config).items():
        spec, generator = specs[0], torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        if spec.shard != "experts":
            tensors[name] = _draw(spec, config, generator)
            continue
        out = _stack(name, spec, config, tensors)
        drawn = _draw(spec, config, generator)
        for number, matrix in enumerate(out):
            matrix.copy_(drawn.roll((977 * number, 7 * number), (0, 1)))
        tensors[name] = out
    return RankWeights(tensors, Topology(), 0)


def _stack(name: str, spec: TensorSpec, config: V4Config, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Room for all experts' matrices of one kind; w3 lies behind w1."""
    outputs, inputs = spec.shape
    if ".w3." in name and (first := tensors.get(name.replace(".w3.", ".w1."))) is not None:
        assert first._base is not None
        return first._base[:, outputs:]
    double = 2 if ".w1." in name else 1
    return torch.empty(config.n_routed_experts, double * outputs, inputs, dtype=BFLOAT16.activation)[:, :outputs]


def _draw(spec: TensorSpec, config: V4Config, generator: torch.Generator) -> torch.Tensor:
    if spec.role == "ids":
        return torch.rand(spec.shape[0], config.n_routed_experts, generator=generator).argsort(1)[:, : spec.shape[1]]
    noise = torch.randn(spec.shape, generator=generator)
    if spec.name.endswith(NEAR_ONE):
        noise = noise.mul_(0.1).add_(1)
    elif spec.name.endswith("gate.bias"):
        noise = noise.mul_(0.1)
    elif not spec.name.endswith(FREE):
        noise = noise.mul_(spec.shape[-1] ** -0.5)
    return noise.to(torch.bfloat16).to(held_dtype(spec, BFLOAT16))


@dataclass(frozen=True)
class Resident:
    """What a step at position `length` may read, of every request.

    rows: by cache family [M, B, N, C] in FP32, N as `PageFamily.readable` lists them. Rows of states are
    [value | score] without the score's positional bias, which belongs to the layer's weights.
    """

    length: int
    rows: Mapping[str, torch.Tensor]


def draw_resident(config: V4Config, requests: int, length: int, seed: int) -> Resident:
    """Rows of size 1, as norms and projections give them."""
    generator, rows = torch.Generator().manual_seed(seed), {}
    for family in page_families(config.sliding_window, config.compress_ratios):
        shape = len(family_layers(family, config)), requests, len(family.readable(length))
        noise = torch.randn(*shape, row_form(family, config, BFLOAT16)[0], generator=generator)
        rows[family.name] = noise.to(torch.bfloat16).float()
    return Resident(length, rows)


def fill_caches(model: Model, caches: Caches, resident: Resident, seed: int) -> None:
    """Admit a request for each of the resident ones and write its rows through permuted page tables. Mutates caches."""
    for number, pages in enumerate(caches.pages.values()):
        random.Random(97 * seed + number).shuffle(pages.free)
    for slot in range(next(iter(resident.rows.values())).shape[1]):
        caches.admit(slot, caches.shape.max_context)
        caches.map_resident(slot, resident.length)
        for family in caches.families:
            index = torch.tensor(family.readable(resident.length), dtype=torch.int64)
            slots_N = caches.tables[family.name].slots(torch.tensor(slot), index)
            for place, layer in enumerate(caches.layers_of(family)):
                rows_NC = resident.rows[family.name][place, slot]
                pool_SC = caches.pool(family.name, place)
                pool_SC.index_copy_(0, slots_N, _held(model, layer, family.name, index, rows_NC).to(pool_SC.dtype))


def _held(model: Model, layer: int, family: str, index: torch.Tensor, rows_NC: torch.Tensor) -> torch.Tensor:
    """The rows as the model holds them in a pool: index keys quantised where they are so, a state's score with its
    bias."""
    if family == "csa_index" and model.numerics.quantisation is not None:
        return quantise_keys(rows_NC)
    attention = model.blocks[layer].attention
    weights = attention.compressor
    if family == "index_state":
        assert attention.indexer is not None
        weights = attention.indexer.compressor
    if not family.endswith("state") or weights is None:
        return rows_NC
    value_NC, score_NC = rows_NC.chunk(2, dim=1)
    return torch.cat((value_NC, score_NC + weights.ape[index % weights.ratio]), dim=1)


def convert(weights: RankWeights, config: V4Config, numerics: Numerics) -> RankWeights:
    """The same numbers as a model of these numerics holds them; tensors of fitting dtype are shared."""
    if numerics.quantisation is not None:
        tensors = quantise_weights(weights, config)
    else:
        held = held_table(config)
        tensors = {name: weights[name].to(held_dtype(specs[0], numerics)) for name, specs in held.items()}
    return RankWeights(tensors, weights.topology, weights.rank)
