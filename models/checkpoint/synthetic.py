"""Random weights that storage can hold exactly, and whole synthetic checkpoints."""

import zlib
from collections.abc import Callable
from pathlib import Path

import torch

from ...parallel.topology import Topology
from ..numerics import FLOAT32, Numerics
from ..v4.config import V4Config
from ..v4.quant import fake_quantise
from .hold import hold, stack_held
from .names import TensorSpec, held_table
from .share import RankWeights
from .tokenizer import byte_level_tokenizer
from .writer import SHARD_BYTES, write_checkpoint


def random_weights(config: V4Config, seed: int, numerics: Numerics, *, draft: bool = False) -> RankWeights:
    """Full random weights (world 1) of the target, with draft also of mtp.*, in the numerics' dtypes;
    for w8a8 as `quantise_weights` gives them.

    Every value survives official storage unchanged. Norm gains, sinks, positional biases and hyper-connection
    parameters are far from neutral. A tensor's values depend on the seed and its name alone.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, specs in held_table(config, draft=draft).items():
        drawn = [hold(spec, _draw(spec, config, _generator(seed, spec.name)), numerics) for spec in specs]
        tensors |= stack_held(name, specs, drawn)
    return RankWeights(tensors, Topology(), 0)


def synthesize(
    directory: Path | str, config: V4Config, seed: int, *, shard_bytes: int = SHARD_BYTES
) -> tuple[str, ...]:
    """Write a random checkpoint in the official layout, with a byte-level tokenizer if the vocabulary holds one.

    Returns notes on what was left out. The directory is made if need be; files of these names are replaced.
    """
    tokenizer_json, notes = byte_level_tokenizer(config)
    weights = random_weights(config, seed, FLOAT32, draft=True)
    write_checkpoint(directory, config, weights, tokenizer_json=tokenizer_json, shard_bytes=shard_bytes)
    return notes


def _generator(seed: int, name: str) -> torch.Generator:
    # The CPU generator takes 32 bits of a seed, so both parts are hashed into those.
    return torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))


def _draw(spec: TensorSpec, config: V4Config, generator: torch.Generator) -> torch.Tensor:
    if spec.role == "ids":
        keys = torch.rand(spec.shape[0], config.n_routed_experts, generator=generator)
        return keys.argsort(dim=-1)[:, : spec.shape[1]]
    noise = torch.randn(spec.shape, generator=generator)
    value = _shape_noise(spec.name)(noise)
    if spec.quant is not None or spec.dtype == "BF16":
        return fake_quantise(value, spec.quant)
    return value


def _shape_noise(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Noise -> values of the size that the tensor's place asks for."""
    if name.endswith("norm.weight"):
        return lambda noise: 1 + 0.3 * noise
    if name.endswith("_scale"):
        return lambda noise: 1 + 0.2 * noise
    if name.endswith("gate.bias"):
        return lambda noise: 0.2 * noise
    if name.endswith(("attn_sink", "ape", "_base", "embed.weight")):
        return lambda noise: noise
    gain = 2.0 if name.endswith("head.weight") else 1.0
    return lambda noise: noise * (gain * noise.shape[-1] ** -0.5)
