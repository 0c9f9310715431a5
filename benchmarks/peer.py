"""The peer: transformers' DeepseekV4ForCausalLM with our weights, FP32, eager; nothing is downloaded.

For benchmarks and tests only; needs the test extra.
"""

import torch

from ..models.v4.config import V4Config

_TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    **{f"hc_head_{part}": f"model.hc_head.hc_{part}" for part in ("fn", "base", "scale")},
}
_COMPRESSOR = {"wkv.weight": "kv_proj.weight", "wgate.weight": "gate_proj.weight", "ape": "position_bias"}
_COMPRESSOR["norm.weight"] = "kv_norm.weight"
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    **{f"hc_attn_{part}": f"attn_hc.{part}" for part in ("fn", "base", "scale")},
    **{f"hc_ffn_{part}": f"ffn_hc.{part}" for part in ("fn", "base", "scale")},
    "attn.attn_sink": "self_attn.sinks",
    "attn.wq_a.weight": "self_attn.q_a_proj.weight",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight",
    "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight",
    **{f"attn.compressor.{a}": f"self_attn.compressor.{b}" for a, b in _COMPRESSOR.items()},
    **{f"attn.indexer.compressor.{a}": f"self_attn.compressor.indexer.{b}" for a, b in _COMPRESSOR.items()},
    "attn.indexer.wq_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "attn.indexer.weights_proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
    "ffn.experts.w2.weight": "mlp.experts.down_proj",
}


def peer_state(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights under transformers' names; gate and up projections of an expert become one tensor."""
    state = {}
    for name, tensor in weights.items():
        if name in _TOP:
            state[_TOP[name]] = tensor
            continue
        _, layer, rest = name.split(".", 2)
        prefix = f"model.layers.{layer}."
        if rest == "ffn.experts.w1.weight":
            up = weights[name.replace(".w1.", ".w3.")]
            state[f"{prefix}mlp.experts.gate_up_proj"] = torch.cat((tensor, up), dim=1)
        elif rest != "ffn.experts.w3.weight":
            state[prefix + _LAYER[rest]] = tensor
    return state


def peer_model(config: V4Config, weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    """The peer in eval mode, built from config.to_json() and filled strictly: no key missing, none unexpected."""
    # Imported here: the library runs without it.
    import transformers

    raw = config.to_json()
    left_out = ("quantization_config", "architectures", "model_type", "torch_dtype")
    kept = {k: v for k, v in raw.items() if k not in left_out and not k.startswith("dspark_")}
    kept["compress_ratios"] = raw["compress_ratios"][: config.num_hidden_layers]
    peer_config = transformers.DeepseekV4Config(**kept)
    peer_config._attn_implementation = "eager"
    net: torch.nn.Module = transformers.DeepseekV4ForCausalLM(peer_config)
    net = net.to(torch.float32).eval()
    net.load_state_dict(peer_state(weights), strict=True)
    return net
