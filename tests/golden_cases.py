"""Small V4 shapes on which all implementations of the target must agree, with their weights and prompts."""

from dataclasses import replace

import torch

from meshspark.models.checkpoint.synthetic import random_weights
from meshspark.models.numerics import Numerics
from meshspark.models.v4.config import V4Config, YarnScaling, tiny

LENGTHS = (1, 3, 4, 5, 127, 128, 129, 300)
"""Prompt lengths on both sides of every boundary of ratio 4, ratio 128 and the windows."""


def _base() -> V4Config:
    return replace(tiny(), o_groups=4, sliding_window=8, index_topk=3, num_hash_layers=2)


def golden_configs() -> dict[str, V4Config]:
    """Name -> shape. Together: every layer kind first and last, windows 8 to 128, top-k that binds and not,
    YaRN on and off, 0 to 3 hash layers, 2 and 4 streams, several group sizes."""
    base, off = _base(), YarnScaling(factor=1.0)
    return {
        "window8": base,
        "plain_rope": replace(
            base,
            num_hidden_layers=3,
            compress_ratios=(0, 4, 128),
            sliding_window=16,
            index_topk=8,
            yarn=off,
            num_hash_layers=1,
            hc_mult=2,
            hc_sinkhorn_iters=3,
        ),
        "all_entries": replace(
            base,
            num_hidden_layers=3,
            compress_ratios=(4, 128, 4),
            sliding_window=128,
            index_topk=512,
            num_hash_layers=0,
            o_groups=8,
            yarn=YarnScaling(factor=4.0, original_max_position_embeddings=64),
        ),
        "odd_widths": replace(
            base,
            hidden_size=96,
            num_hidden_layers=3,
            vocab_size=101,
            num_attention_heads=6,
            head_dim=24,
            qk_rope_head_dim=8,
            q_lora_rank=48,
            o_groups=3,
            o_lora_rank=20,
            sliding_window=7,
            compress_ratios=(4, 0, 128),
            index_head_dim=40,
            index_topk=5,
            moe_intermediate_size=64,
            num_hash_layers=1,
            # Large enough that each place where an epsilon is added shows.
            hc_eps=0.03,
            rms_norm_eps=0.05,
        ),
        "hash_layers": replace(
            base,
            num_hidden_layers=4,
            compress_ratios=(128, 0, 4, 4),
            sliding_window=16,
            index_topk=8,
            num_attention_heads=6,
            o_groups=2,
            num_hash_layers=3,
            num_experts_per_tok=4,
            routed_scaling_factor=2.5,
        ),
    }


def golden_weights(config: V4Config, numerics: Numerics, seed: int = 7) -> dict[str, torch.Tensor]:
    """The same values in every numerics: they survive official storage, so narrow dtypes hold them too."""
    return dict(random_weights(config, seed, numerics))


def golden_prompts(config: V4Config) -> list[list[int]]:
    """One prompt per entry of LENGTHS; none is a prefix of another."""
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(config.vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]
