"""Official drafters of both variants at small sizes: random codes, scales and values, written as mtp.* of a release is.

Widths are no multiples of the blocks. The shards of the target are named by the index, but absent.
"""

import json
import zlib
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from meshspark.models.checkpoint.names import TensorSpec
from meshspark.models.conversion.configs import official_shape
from meshspark.models.conversion.variants import VARIANTS, official_table, plain_table
from meshspark.models.v4.config import DSparkFields, V4Config

INDEX = "model.safetensors.index.json"
VARIANT_NAMES = tuple(VARIANTS)
SMALL = (".experts.1.", ".experts.3.", ".wq_a.", ".w2.")

V4 = V4Config(
    hidden_size=160,
    num_hidden_layers=5,
    vocab_size=264,
    num_attention_heads=4,
    head_dim=40,
    qk_rope_head_dim=8,
    q_lora_rank=72,
    o_groups=2,
    o_lora_rank=72,
    sliding_window=16,
    compress_ratios=(0, 4, 128, 4, 0),
    draft_ratios=(0, 0, 0),
    index_n_heads=4,
    index_head_dim=32,
    index_topk=8,
    moe_intermediate_size=96,
    n_routed_experts=4,
    num_experts_per_tok=2,
    num_hash_layers=1,
    max_position_embeddings=4096,
    dspark=DSparkFields(5, 262, (2, 3, 4), 8, 3),
)


def official_json(variant: str) -> dict:
    """The config.json of the target; V4.1's target has twice the experts of its drafter."""
    raw = V4.to_json()
    if variant == "v4":
        return raw
    for key in ("compress_ratios", "num_hash_layers", "rope_scaling", "index_topk", "index_n_heads", "index_head_dim"):
        del raw[key]
    block = {**raw["quantization_config"], "weight_block_size": [32, 32]}
    return {
        **raw,
        "model_type": "deepseek_v41",
        "rms_norm_eps": 1e-20,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 2,
        "num_nextn_predict_layers": 3,
        "pad_token_id": 2,
        "quantization_config": block,
    }


@lru_cache
def table_of(variant: str, *, plain: bool = False) -> tuple[TensorSpec, ...]:
    table = official_table(VARIANTS[variant], official_shape(VARIANTS[variant], official_json(variant), "config.json"))
    return plain_table(table) if plain else table


def random_tensor(name: str, dtype: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Any FP4 bytes, any FP8 codes but NaN, scales from 2^-13 to 2^4, BF16 and FP32 of all magnitudes near 1.

    Of some tensors no code is large: an encoder would choose them smaller scales.
    """
    random = np.random.default_rng(zlib.crc32(f"{seed} {name}".encode()))
    count = int(np.prod(shape))
    if dtype in ("I8", "F8_E4M3"):
        codes = random.integers(0, 256, count, dtype=np.uint8)
        if any(mark in name for mark in SMALL):
            codes &= 0xBB if dtype == "I8" else 0xBF
        if dtype == "F8_E4M3":
            codes[codes & 0x7F == 0x7F] = 0x3C
        held = {"I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn}[dtype]
        return torch.from_numpy(codes).view(held).view(shape)
    if dtype == "F8_E8M0":
        return torch.from_numpy(random.integers(114, 132, count, dtype=np.uint8)).view(torch.float8_e8m0fnu).view(shape)
    values = torch.from_numpy(random.standard_normal(count).astype(np.float32)).view(shape)
    return values.to(torch.bfloat16) if dtype == "BF16" else values


def random_official(variant: str) -> dict[str, torch.Tensor]:
    """Stored tensors by official name; bias_vl is other than the bias."""
    return {name: tensor.clone() for name, tensor in _random_official(variant).items()}


@lru_cache
def _random_official(variant: str, seed: int = 3) -> dict[str, torch.Tensor]:
    made = {}
    for spec in table_of(variant):
        made[spec.name] = random_tensor(spec.name, spec.dtype, spec.stored_shape, seed)
        if spec.scale_name is not None:
            made[spec.scale_name] = random_tensor(spec.scale_name, "F8_E8M0", spec.scale_shape, seed)
    return made


def write_official(
    folder: Path, variant: str, tensors: dict[str, torch.Tensor] | None = None, *, parts: int = 3
) -> Path:
    """A release's folder whose last shards hold mtp.*; of the others the index alone knows."""
    tensors = random_official(variant) if tensors is None else tensors
    folder.mkdir(parents=True, exist_ok=True)
    names, weight_map = (
        list(tensors),
        {"embed.weight": "model-00001-of-00009.safetensors", "norm.weight": "gone.safetensors"},
    )
    for part in range(parts):
        shard = f"model-{part + 10 - parts:05d}-of-00009.safetensors"
        mine = names[part::parts]
        save_file({name: tensors[name].clone() for name in mine}, folder / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(mine, shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(official_json(variant), indent=1))
    return folder


def naive_value(codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Value by value in Python's floats, training.md 8.1 as it is written: [O, I] in FP64."""
    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    table += [-value for value in table]
    powers = [[2.0 ** (byte - 127) for byte in row] for row in scale.view(torch.uint8).tolist()]
    rows = []
    if codes.dtype == torch.float8_e4m3fn:
        values = codes.float().tolist()
    else:
        values = [
            [table[n] for byte in row for n in (byte & 15, byte >> 4)] for row in codes.view(torch.uint8).tolist()
        ]
    for o, row in enumerate(values):
        rows.append([value * powers[o // block[0]][i // block[1]] for i, value in enumerate(row)])
    return torch.tensor(rows, dtype=torch.float64)


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the shards that a folder's index names."""
    from safetensors.torch import load_file

    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    found = {}
    for shard in sorted(set(weight_map.values())):
        found |= load_file(folder / shard)
    return found


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
    )
