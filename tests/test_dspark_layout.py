"""Official drafters in names, shapes and configs: published counts, our names, which variant it is."""

import json
from collections import Counter
from math import prod
from pathlib import Path

import pytest
import torch
from official_drafters import VARIANT_NAMES, official_json, table_of, write_official

from meshspark.models.checkpoint.reader import CheckpointError
from meshspark.models.conversion.configs import draft_json, official_shape, own_shape, unquantised
from meshspark.models.conversion.names import draft_tensors, places
from meshspark.models.conversion.official import open_official
from meshspark.models.conversion.variants import (
    VARIANTS,
    check_variant,
    count_files,
    official_table,
    plain_table,
    tell_variant,
    variant_of,
)
from meshspark.models.v4.config import flash_dspark

V41_FLASH = {
    **flash_dspark().to_json(),
    "model_type": "deepseek_v41",
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "q_lora_rank": 1280,
    "rms_norm_eps": 1e-20,
    "moe_intermediate_size": 2304,
    "n_routed_experts": 384,
    "dspark_n_routed_experts": 128,
    "dspark_num_experts_per_tok": 3,
    "num_nextn_predict_layers": 3,
    "dspark_target_layer_ids": [37, 38, 39],
    "pad_token_id": 2,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]},
}
PUBLISHED = {"v4": flash_dspark().to_json(), "v41": V41_FLASH}
COUNTS = {"v4": (4705, 78, 19_845_850_983, 10.12), "v41": (2401, 75, 14_225_362_146, 7.39)}
"""Variant -> official tensors, ours, elements of ours, GiB of the official file."""


def published(variant: str):
    shape = official_shape(VARIANTS[variant], PUBLISHED[variant], "config.json")
    return shape, official_table(VARIANTS[variant], shape)


@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_published_counts(variant: str) -> None:
    _, table = published(variant)
    official, ours, elements, gib = COUNTS[variant]
    assert count_files(table) == official
    tensors = draft_tensors(table)
    assert len(tensors) == ours == len({tensor.name for tensor in tensors})
    assert sum(tensor.numel for tensor in tensors) == elements
    num_bytes = sum(
        prod(spec.stored_shape) * {"BF16": 2, "F32": 4}.get(spec.dtype, 1) + prod(spec.scale_shape or (0,))
        for spec in table
    )
    assert round(num_bytes / 2**30, 2) == gib
    assert not [spec.name for spec in table if not spec.name.startswith("mtp.")]


def test_the_tally_of_v4() -> None:
    """dspark.md 2: 2304 packed FP4, 2329 scales, 25 FP8, 20 BF16, 27 F32."""
    _, table = published("v4")
    assert Counter(spec.dtype for spec in table) == {"I8": 2304, "F8_E4M3": 25, "BF16": 20, "F32": 27}
    assert sum(spec.scale_name is not None for spec in table) == 2329
    assert sum(prod(spec.shape) for spec in table) == 19_845_850_983


OFFICIAL_SHAPES = {
    "v4": {
        "mtp.0.attn.wq_a.weight": ((1024, 4096), (8, 32)),
        "mtp.1.attn.wq_b.weight": ((32768, 1024), (256, 8)),
        "mtp.2.attn.wkv.weight": ((512, 4096), (4, 32)),
        "mtp.0.attn.wo_a.weight": ((8192, 4096), (64, 32)),
        "mtp.0.attn.wo_b.weight": ((4096, 8192), (32, 64)),
        "mtp.0.ffn.experts.255.w1.weight": ((2048, 2048), (2048, 128)),
        "mtp.0.ffn.experts.0.w2.weight": ((4096, 1024), (4096, 64)),
        "mtp.0.ffn.shared_experts.w2.weight": ((4096, 2048), (32, 16)),
        "mtp.0.main_proj.weight": ((4096, 12288), (32, 96)),
        "mtp.2.hc_head_fn": ((4, 16384), None),
        "mtp.1.hc_attn_fn": ((24, 16384), None),
        "mtp.2.markov_head.markov_w1.weight": ((129280, 256), None),
        "mtp.2.confidence_head.proj.weight": ((1, 4352), None),
    },
    "v41": {
        "mtp.0.attn.wq_a.weight": ((1280, 5120), (40, 160)),
        "mtp.1.attn.wq_b.weight": ((32768, 1280), (1024, 40)),
        "mtp.0.attn.wo_b.weight": ((5120, 8192), (160, 256)),
        "mtp.0.ffn.experts.127.w3.weight": ((2304, 2560), (2304, 160)),
        "mtp.0.ffn.experts.0.w2.weight": ((5120, 1152), (5120, 72)),
        "mtp.0.main_proj.weight": ((5120, 15360), (160, 480)),
        "mtp.1.ffn.gate.bias_vl": ((128,), None),
        "mtp.2.markov_head.embed.weight": ((129280, 256), None),
        "mtp.2.markov_head.head.weight": ((129280, 256), None),
        "mtp.2.confidence_head.proj.weight": ((1, 5376), None),
    },
}
OUR_SHAPES = {
    "v4": {
        "layers.0.self_attn.q_a_proj.weight": (1024, 4096),
        "layers.2.self_attn.sinks": (64,),
        "layers.1.mlp.experts.gate_up_proj": (256, 4096, 4096),
        "layers.1.mlp.experts.down_proj": (256, 4096, 2048),
        "layers.0.mlp.gate.expert_bias": (256,),
        "layers.0.mlp.shared_experts.down_proj.weight": (4096, 2048),
        "fc.weight": (4096, 12288),
        "hidden_norm.weight": (4096,),
        "norm.weight": (4096,),
        "residual_readout.mix_weight": (4, 16384),
        "markov_head.markov_w2.weight": (129280, 256),
        "confidence_head.proj.weight": (1, 4352),
    },
    "v41": {
        "layers.2.mlp.experts.gate_up_proj": (128, 4608, 5120),
        "layers.2.mlp.experts.down_proj": (128, 5120, 2304),
        "fc.weight": (5120, 15360),
        "markov_head.markov_w1.weight": (129280, 256),
    },
}


@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_published_shapes(variant: str) -> None:
    _, table = published(variant)
    official = {spec.name: (spec.stored_shape, spec.scale_shape) for spec in table}
    assert OFFICIAL_SHAPES[variant].items() <= official.items()
    tensors = draft_tensors(table)
    ours = {tensor.name: tensor.shape for tensor in tensors}
    assert OUR_SHAPES[variant].items() <= ours.items()
    assert ("residual_readout.mix_weight" in ours) == (variant == "v4")
    wide = {tensor.name for tensor in tensors if tensor.is_wide}
    mixes = [f"{site}_residual.mix_{part}" for site in ("attn", "ffn") for part in ("weight", "bias", "scale")]
    each = ["self_attn.sinks", "mlp.gate.expert_bias", *mixes]
    readout = {name for name in ours if name.startswith("residual_readout.")}
    assert wide == {f"layers.{stage}.{name}" for stage in range(3) for name in each} | readout


@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_every_official_tensor_has_one_place_among_ours(variant: str) -> None:
    """All rows of each of ours are somebody's, once; the gate's come before the up's."""
    table = table_of(variant)
    found = places(draft_tensors(table))
    assert {spec.name for spec in table} - found.keys() == {
        spec.name for spec in table if spec.name.endswith("bias_vl")
    }
    taken = Counter()
    for name, place in found.items():
        taken[place.tensor.name] += (place.rows.stop - place.rows.start) * prod(place.tensor.shape[-1:])
        if name.endswith((".w1.weight", ".w3.weight")) and ".experts." in name:
            assert place.rows.start == (96 if ".w3." in name else 0) * (place.expert is not None)
    for tensor in draft_tensors(table):
        if len(tensor.shape) > 1:
            assert taken[tensor.name] == tensor.numel, tensor.name


V4_EXPECTED = {
    "architectures": ["DSparkDraftModel"],
    "vocab_size": 129280, "hidden_size": 4096, "num_hidden_layers": 3, "num_target_layers": 43,
    "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1024,
    "o_groups": 8, "o_lora_rank": 1024, "rms_norm_eps": 1e-6, "rope_theta": 10000, "block_size": 5,
    "moe_preset": "deepseek_v4", "n_routed_experts": 256, "num_experts_per_tok": 6, "moe_intermediate_size": 2048,
    "n_shared_experts": 1, "scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5, "swiglu_limit": 10.0,
    "hidden_act": "silu", "attention_bias": False, "layer_types": ["full_attention"] * 3, "tie_word_embeddings": False,
    "dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1,
    "draft_residual": {"kind": "mhc", "streams": 4, "sinkhorn_iters": 20, "eps": 1e-6, "pre_from_prev": False},
    "dflash_config": {
        "target_layer_ids": [40, 41, 42], "mask_token_id": 128799, "projector_type": "dspark",
        "attention_mode": "deepseek_v4", "context_window": 128, "markov_rank": 256, "markov_head_type": "vanilla",
        "enable_confidence_head": True, "confidence_head_with_markov": True, "confidence_head_bias": False,
        "confidence_head_input": "pre_norm", "moe_router_enable_expert_bias": True,
    },
}  # fmt: skip
"""training.md 6, field by field."""
V41_OTHER = {
    "hidden_size": 5120, "num_target_layers": 40, "q_lora_rank": 1280, "rms_norm_eps": 1e-20, "n_routed_experts": 128,
    "num_experts_per_tok": 3, "moe_intermediate_size": 2304, "pad_token_id": 2,
    "draft_residual": {**V4_EXPECTED["draft_residual"], "pre_from_prev": True},
    "dflash_config": {
        **V4_EXPECTED["dflash_config"], "target_layer_ids": [37, 38, 39], "attention_mode": "deepseek_v41",
    },
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_the_drafts_config(variant: str) -> None:
    shape, table = published(variant)
    config = draft_json(VARIANTS[variant], shape, PUBLISHED[variant], "bfloat16")
    assert config == (V4_EXPECTED if variant == "v4" else V4_EXPECTED | V41_OTHER)
    again, own = own_shape(json.loads(json.dumps(config)), Path("config.json"))
    assert again.name == variant
    names = [(tensor.name, tensor.shape) for tensor in draft_tensors(table)]
    assert [(tensor.name, tensor.shape) for tensor in draft_tensors(official_table(again, own))] == names


@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_the_unquantised_config(variant: str) -> None:
    """Everything else stays as it is, unknown keys too."""
    raw = {**PUBLISHED[variant], "scale_fmt": "ue8m0", "something": {"new": 1}}
    left = unquantised(raw)
    assert left.pop("architectures") == ["DeepseekV4ForCausalLMDSpark"]
    gone = {"quantization_config", "expert_dtype", "scale_fmt", "architectures"}
    assert left == {key: value for key, value in raw.items() if key not in gone}


@pytest.mark.parametrize("key", ["dspark_n_routed_experts", "hidden_size", "num_nextn_predict_layers", "hc_eps"])
def test_v41_sizes_are_never_guessed(key: str) -> None:
    raw = {name: value for name, value in V41_FLASH.items() if name != key}
    with pytest.raises(CheckpointError, match=rf"config\.json: lacks {key}, which a V4\.1 drafter"):
        official_shape(VARIANTS["v41"], raw, "config.json")


@pytest.mark.parametrize(
    ("variant", "change", "message"),
    [
        ("v4", {"compress_ratios": [0, 4, 128, 4, 0]}, "compress_ratios of drafter stages"),
        ("v4", {"compress_ratios": [0, 4, 128, 4, 0, 0, 4, 0]}, r"compress_ratios of drafter stages are \(0, 4, 0\)"),
        ("v4", {"dspark_markov_rank": None}, r"lacks \['dspark_markov_rank'\]"),
        ("v4", {"hidden_size": 161}, "fp4 needs columns in groups of 32"),
        ("v41", {"num_nextn_predict_layers": 0}, "num_nextn_predict_layers is 0, allowed: a whole number from 1 to 64"),
        ("v41", {"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers is 1000000000, allowed"),
        ("v41", {"quantization_config": [1]}, r"quantization_config is \[1\], allowed: an object"),
        ("v41", {"dspark_num_experts_per_tok": 5}, "num_experts_per_tok is 5, allowed: at most n_routed_experts 4"),
        ("v41", {"o_groups": 3}, "num_attention_heads % o_groups"),
    ],
)
def test_wrong_configs(tmp_path: Path, variant: str, change: dict, message: str) -> None:
    folder = write_official(tmp_path / "in", variant)
    (folder / "config.json").write_text(json.dumps(official_json(variant) | change))
    with pytest.raises(CheckpointError, match=message) as caught:
        open_official(folder, VARIANTS[variant])
    assert "config.json" in str(caught.value)


def names_of(variant: str) -> list[str]:
    return [spec.name for spec in table_of(variant)]


def test_which_variant_it_is() -> None:
    here = Path("here")
    for variant, other in (VARIANT_NAMES, VARIANT_NAMES[::-1]):
        names = ["embed.weight", "head.weight", "hc_head_fn", *names_of(variant)]
        assert tell_variant(names, here).name == variant
        check_variant(VARIANTS[variant], names, here)
        with pytest.raises(CheckpointError, match=f"drafter by its tensors .* but the variant is {other}; .*{variant}"):
            check_variant(VARIANTS[other], names, here)
        for odd in ([*names_of("v4"), *names_of("v41")], ["mtp.0.attn.wq_a.weight"]):
            with pytest.raises(CheckpointError, match="has marks of"):
                tell_variant(odd, here)
        with pytest.raises(CheckpointError, match=r"a plain MTP layer by its tensors \(mtp\.0\.enorm"):
            check_variant(VARIANTS[variant], ["mtp.0.enorm.weight", "mtp.0.hc_head_fn"], here)
        with pytest.raises(CheckpointError, match=r"names no tensor mtp\.\*"):
            check_variant(VARIANTS[variant], ["embed.weight"], here)
    with pytest.raises(ValueError, match=r"variant is 'v5', allowed: v4, v41"):
        variant_of("v5")


def test_the_plain_table_has_no_scales() -> None:
    table = table_of("v41")
    plain = plain_table(table)
    assert [spec.name for spec in plain] == [spec.name for spec in table]
    assert not [spec for spec in plain if spec.quant or spec.scale_name] and count_files(plain) == len(plain)
    assert {spec.dtype for spec in plain} == {"BF16", "F32"}
    assert [spec.dtype for spec in plain if spec.dtype == "F32"] == [
        spec.dtype for spec in table if spec.dtype == "F32"
    ]
    assert torch.Size(plain[0].stored_shape) == torch.Size(plain[0].shape)
