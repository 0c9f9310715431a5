"""The contract of a resumed training: what must be as it was, beside tensors. training.md 4.5."""

from collections.abc import Mapping

from .config import DraftConfig
from .config_checks import RESIDUAL_KEYS
from .resume import Contract, attention_contract

OBJECTIVE_KEYS = ("num_anchors", "loss_decay_gamma", "ce_loss_alpha", "l1_loss_alpha", "confidence_head_alpha")
"""What the contract takes of the objective's settings."""

_MOE_KEYS = (
    "moe_router_enable_expert_bias",
    "moe_router_bias_update_rate",
    "moe_router_aux_loss_coef",
    "moe_router_aux_loss_type",
)


def resume_contract(config: DraftConfig, attention_backend: str, objective: Mapping[str, object]) -> Contract:
    """The contract of a draft and its objective, for `check_contract`: plain values under flat names.

    Windows, the residual's settings and those of mixtures are in it only where they are set, so that contracts that
    were written without such keys compare equal. How ranks are laid out is no part of it. ValueError where the
    objective lacks one of OBJECTIVE_KEYS.
    """
    missing = [key for key in OBJECTIVE_KEYS if key not in objective]
    if missing:
        raise ValueError(f"the objective's settings lack {', '.join(missing)}")
    dflash, residual = config.dflash, config.residual
    contract: Contract = {
        "draft_layers": config.num_hidden_layers,
        "target_layer_ids": list(dflash.target_layer_ids),
        "block_size": config.block_size,
        "mask_token_id": dflash.mask_token_id,
        **attention_contract(config.attention(attention_backend)),
        **{key: objective[key] for key in OBJECTIVE_KEYS},
    }
    if config.is_mtp:
        contract["projector_type"] = dflash.projector_type
    if residual.kind != "standard":
        contract |= {f"draft_residual.{key}": getattr(residual, key) for key in RESIDUAL_KEYS[residual.kind]}
    if config.has_moe:
        contract |= {"moe_preset": config.moe_preset} | {key: getattr(dflash, key) for key in _MOE_KEYS}
        if config.ffn_layer_types is not None:
            contract["ffn_layer_types"] = list(config.ffn_layer_types)
    return contract
