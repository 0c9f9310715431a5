"""The peer: transformers' DeepseekV4ForCausalLM with our weights, eager attention; nothing is downloaded.

For benchmarks and tests only; needs the test extra.

Legend: B requests, S rows of each, N resident rows, C columns, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import torch

from ..models.v4.config import V4Config
from .slice import Resident

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


def peer_state(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights under transformers' names; gate and up projections of an expert become one tensor.

    A copy is made of these two alone, and not where they are views of one tensor already.
    """
    state = {}
    for name, tensor in weights.items():
        if name in _TOP:
            state[_TOP[name]] = tensor
            continue
        _, layer, rest = name.split(".", 2)
        prefix = f"model.layers.{layer}."
        if rest == "ffn.experts.w1.weight":
            state[f"{prefix}mlp.experts.gate_up_proj"] = _joined(tensor, weights[name.replace(".w1.", ".w3.")])
        elif rest != "ffn.experts.w3.weight":
            state[prefix + _LAYER[rest]] = tensor
    return state


def _joined(gate_XIH: torch.Tensor, up_XIH: torch.Tensor) -> torch.Tensor:
    whole = gate_XIH._base
    outputs = gate_XIH.shape[1]
    if whole is not None and whole is up_XIH._base and whole.shape[1] == 2 * outputs:
        first, second = whole[:, :outputs], whole[:, outputs:]
        if first.data_ptr() == gate_XIH.data_ptr() and second.data_ptr() == up_XIH.data_ptr():
            return whole
    return torch.cat((gate_XIH, up_XIH), dim=1)


def peer_model(
    config: V4Config, weights: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.float32
) -> torch.nn.Module:
    """The peer in eval mode, built from config.to_json() and filled strictly: no key missing, none unexpected.

    In BF16 it keeps in FP32 what transformers keeps so when it loads a checkpoint. Weights that have their dtype
    already are shared, not copied.
    """
    # Imported here: the library runs without it.
    import transformers

    raw = config.to_json()
    left_out = ("quantization_config", "architectures", "model_type", "torch_dtype")
    kept = {k: v for k, v in raw.items() if k not in left_out and not k.startswith("dspark_")}
    kept["compress_ratios"] = raw["compress_ratios"][: config.num_hidden_layers]
    peer_config = transformers.DeepseekV4Config(**kept)
    peer_config._attn_implementation = "eager"
    with torch.device("meta"):
        net: torch.nn.Module = transformers.DeepseekV4ForCausalLM(peer_config)
    wide: set[str] = net._keep_in_fp32_modules_strict  # type: ignore[assignment]
    state = {
        name: tensor.to(torch.float32 if wide.intersection(name.split(".")) else dtype)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in peer_state(weights).items()
    }
    net.load_state_dict(state, strict=True, assign=True)
    _restore_frequencies(net)
    return net.eval()


def _restore_frequencies(net: torch.nn.Module) -> None:
    """Rotary frequencies are no weights: whatever is still without memory is made anew."""
    for parent in list(net.modules()):
        for name, child in parent.named_children():
            if any(buffer.is_meta for buffer in child.buffers(recurse=False)):
                setattr(parent, name, type(child)(child.config))


class PeerSteps:
    """Steps of the peer from a cache that holds `resident`; `restore` goes back there."""

    def __init__(self, net: Any, resident: Resident) -> None:
        import transformers

        self.net, dtype = net, net.lm_head.weight.dtype
        self.cache = transformers.DynamicCache(config=net.config)
        layers: list[Any] = self.cache.layers
        for number, layer in enumerate(layers):
            _fill_layer(layer, net.model.layers[number].self_attn.compressor, _rows_of(net, number, resident), dtype)
            layer.cumulative_length = resident.length
        self._saved = [_copied(vars(layer)) for layer in self.cache.layers]

    def restore(self) -> None:
        """Back to the resident rows. Steps put new tensors in the places of old ones, so these are still whole."""
        for layer, saved in zip(self.cache.layers, self._saved, strict=True):
            vars(layer).update(_copied(saved))

    @torch.no_grad()
    def step(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        """Logits [B, S, V] of the next rows."""
        logits: torch.Tensor = self.net(tokens_BS, cache=self.cache, use_cache=True).logits
        return logits


def _copied(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: dict(value) if isinstance(value, dict) else value for name, value in fields.items()}


_FAMILIES = {
    "compressed_sparse_attention": {"compressor": ("csa_kv", "csa_state"), "indexer": ("csa_index", "index_state")},
    "heavily_compressed_attention": {"compressor": ("hca_kv", "hca_state")},
}
"""The peer's kind of layer -> its compressors -> families of their entries and states."""


def _rows_of(net: Any, number: int, resident: Resident) -> dict[str, torch.Tensor]:
    """The layer's resident rows [B, N, C] under transformers' names, states as pairs under (name, "state")."""
    kinds = list(net.config.layer_types)
    place = kinds[:number].count(kinds[number])
    rows = {"window": resident.rows["window_kv"][number], "length": torch.tensor(resident.length)}
    for name, (entries, states) in _FAMILIES.get(kinds[number], {}).items():
        rows[name] = resident.rows[entries][place]
        rows[f"{name} state"] = resident.rows[states][place]
    return rows


def _fill_layer(layer: Any, compressor: Any, rows: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
    keys = rows["window"].to(dtype).unsqueeze(1)
    layer.lazy_initialization(keys, keys)
    layer.keys = layer.values = keys
    for name in getattr(layer, "compressed_kv", ()):
        weights = compressor.indexer if name == "indexer" else compressor
        entries_BND = rows[name].to(dtype)
        layer.compressed_kv[name], layer.entry_count[name] = entries_BND, entries_BND.shape[1]
        value_BNC, score_BNC = rows[f"{name} state"].to(dtype).chunk(2, dim=-1)
        older = value_BNC.shape[1] - int(rows["length"]) % layer.compress_rate
        layer.buffer_kv[name], layer.buffer_gate[name] = value_BNC[:, older:], score_BNC[:, older:]
        if older and hasattr(layer, "overlap_kv"):
            half = entries_BND.shape[-1]
            layer.overlap_kv[name] = value_BNC[:, :older, :half]
            layer.overlap_gate[name] = (score_BNC[:, :older] + weights.position_bias)[..., :half]
