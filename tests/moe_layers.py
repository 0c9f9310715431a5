"""Mixture layers of both families at small sizes, for tests."""

from types import SimpleNamespace

import torch

from meshspark.models.moe.families import build_moe
from meshspark.models.moe.layer import MoELayer

B, Q, H, W, E, K = 2, 6, 16, 8, 8, 3
BACKENDS = ("grouped", "loop")

DFLASH = {
    "moe_router_enable_expert_bias": False,
    "moe_router_bias_update_rate": 0.0,
    "moe_router_aux_loss_coef": 0.0,
    "moe_router_aux_loss_type": "batch_wise",
}
V4 = {
    "moe_preset": "deepseek_v4",
    "n_routed_experts": E,
    "num_experts_per_tok": K,
    "moe_intermediate_size": W,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 0.6,
}
QWEN = {
    "moe_preset": "qwen3_5_moe",
    "num_experts": E,
    "num_experts_per_tok": K,
    "moe_intermediate_size": W,
    "shared_expert_intermediate_size": 12,
}


def config(base: dict, dflash: dict | None = None, **keys) -> SimpleNamespace:
    """A draft's config: absent keys are None."""
    known = dict.fromkeys((*V4, *QWEN, "ffn_layer_types", "intermediate_size"))
    values = {**known, "hidden_size": H, "num_hidden_layers": 2, "hidden_act": "silu", "initializer_range": 0.02}
    return SimpleNamespace(**{**values, **base, **keys}, dflash=SimpleNamespace(**{**DFLASH, **(dflash or {})}))


def layer(base: dict, seed: int = 0, dtype: torch.dtype = torch.float32, **dflash) -> MoELayer:
    """A layer of the family, its weights large enough that the clamp is felt, its bias, where it has one, not zero."""
    torch.manual_seed(seed)
    made = build_moe(config(base, dflash))
    made.reset_parameters(0.5)
    if made.gate.expert_bias is not None:
        made.gate.expert_bias.copy_(torch.linspace(-0.5, 0.5, E))
    return made.to(dtype)


def hidden(dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, Q, H, generator=generator, dtype=torch.float64).to(dtype)
