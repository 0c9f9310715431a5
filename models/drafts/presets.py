"""Configs of drafts by name: those of the V4 releases, and a mixture draft for Qwen3-8B. training.md 2.4 and 6."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from .config import DFlashFields, DraftConfig, ResidualFields


def deepseek_v4_flash_dspark() -> DraftConfig:
    """The drafter of DeepSeek-V4-Flash: 78 tensors, 19,845,850,983 elements. Features are layers' outputs."""
    return DraftConfig(
        vocab_size=129280,
        hidden_size=4096,
        num_hidden_layers=3,
        num_target_layers=43,
        num_attention_heads=64,
        num_key_value_heads=1,
        head_dim=512,
        block_size=5,
        dflash=DFlashFields(
            target_layer_ids=(40, 41, 42),
            mask_token_id=128799,
            attention_mode="deepseek_v4",
            context_window=128,
            markov_rank=256,
            enable_confidence_head=True,
            confidence_head_with_markov=True,
            confidence_head_bias=False,
            confidence_head_input="pre_norm",
            moe_router_enable_expert_bias=True,
        ),
        residual=ResidualFields("mhc", pre_from_prev=False),
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        q_lora_rank=1024,
        qk_rope_head_dim=64,
        o_groups=8,
        o_lora_rank=1024,
        layer_types=("full_attention",) * 3,
        moe_preset="deepseek_v4",
        n_routed_experts=256,
        num_experts_per_tok=6,
        moe_intermediate_size=2048,
        n_shared_experts=1,
        scoring_func="sqrtsoftplus",
        routed_scaling_factor=1.5,
        swiglu_limit=10.0,
        bos_token_id=0,
        eos_token_id=1,
    )


def deepseek_v4_flash_mtp() -> DraftConfig:
    """The plain MTP layer of DeepSeek-V4-Flash: 31 tensors. Features are the streams behind the last layer."""
    return replace(
        deepseek_v4_flash_dspark(),
        num_hidden_layers=1,
        block_size=1,
        layer_types=("sliding_attention",),
        sliding_window=128,
        dflash=DFlashFields(
            target_layer_ids=(42,),
            mask_token_id=None,
            projector_type="mtp",
            attention_mode="deepseek_v4",
            moe_router_enable_expert_bias=True,
        ),
    )


def deepseek_v41_flash_dspark() -> DraftConfig:
    """The drafter of V4.1-Flash: 75 tensors, 14,225,362,146 elements. Features are the streams that enter a layer."""
    v4 = deepseek_v4_flash_dspark()
    return replace(
        v4,
        hidden_size=5120,
        num_target_layers=40,
        q_lora_rank=1280,
        rms_norm_eps=1e-20,
        n_routed_experts=128,
        num_experts_per_tok=3,
        moe_intermediate_size=2304,
        pad_token_id=2,
        dflash=replace(v4.dflash, target_layer_ids=(37, 38, 39), attention_mode="deepseek_v41"),
        residual=ResidualFields("mhc", pre_from_prev=True),
    )


def qwen3_8b_moe_dspark() -> DraftConfig:
    """A draft for Qwen3-8B whose feed-forward networks are mixtures of 8 experts, one for each token.

    With one expert the renormalised weight is always 1: the router learns from the auxiliary loss alone, and from its
    bias.
    """
    return DraftConfig(
        vocab_size=151936,
        hidden_size=4096,
        num_hidden_layers=5,
        num_target_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        block_size=7,
        dflash=DFlashFields(
            target_layer_ids=(1, 9, 17, 25, 33),
            mask_token_id=151669,
            markov_rank=256,
            enable_confidence_head=True,
            confidence_head_with_markov=True,
            moe_router_enable_expert_bias=True,
            moe_router_bias_update_rate=1e-3,
            moe_router_aux_loss_coef=0.005,
            moe_router_aux_loss_type="batch_wise",
        ),
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        layer_types=("full_attention",) * 5,
        moe_preset="qwen3_5_moe",
        num_experts=8,
        num_experts_per_tok=1,
        moe_intermediate_size=1536,
        max_position_embeddings=40960,
        bos_token_id=151643,
        eos_token_id=151645,
    )


PRESETS: Mapping[str, Callable[[], DraftConfig]] = MappingProxyType(
    {
        "deepseek-v4-flash-dspark": deepseek_v4_flash_dspark,
        "deepseek-v4-flash-mtp": deepseek_v4_flash_mtp,
        "deepseek-v4.1-flash-dspark": deepseek_v41_flash_dspark,
        "qwen3-8b-moe-dspark": qwen3_8b_moe_dspark,
    }
)


def draft_preset(name: str) -> DraftConfig:
    """The config of this name. ValueError for an unknown one."""
    if name not in PRESETS:
        raise ValueError(f"no draft config is named {name!r}, allowed: {', '.join(PRESETS)}")
    return PRESETS[name]()
