"""A second MTP layer: naive, over one whole sequence, no pool, no steps; the arithmetic of the description.

Legend: S rows, h streams, H hidden, D head dim, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from naive_v4 import Weights, attend, collapse, expand, experts, norm, rope_frequencies, stream_products, turn

from meshspark.models.v4.config import V4Config


@dataclass(frozen=True)
class NaiveMtp:
    """Of the rows at positions 0 to S - 1: keys [S, D], and logits [S, V] of the token two positions on."""

    keys: torch.Tensor
    logits: torch.Tensor


@torch.no_grad()
def naive_mtp(config: V4Config, weights: Weights, streams: torch.Tensor, tokens: Sequence[int]) -> NaiveMtp:
    """The layer over rows whose last target streams [S, h, H] and whose tokens [S + 1] are given, in FP64.

    Row q sees streams[q] and tokens[q + 1]; it attends to rows of the window that ends with it.
    """
    block = {name.removeprefix("mtp.0."): w.double() for name, w in weights.items() if name.startswith("mtp.0.")}
    embed, head = weights["embed.weight"].double(), weights["head.weight"].double()
    rows, positions = len(streams), list(range(len(streams)))
    assert len(tokens) == rows + 1
    own = []
    for q in positions:
        token = block["e_proj.weight"] @ norm(embed[tokens[q + 1]], block["enorm.weight"], config)
        of_streams = [
            block["h_proj.weight"] @ norm(streams[q, j].double(), block["hnorm.weight"], config)
            for j in range(config.hc_mult)
        ]
        own.append(torch.stack([stream + token for stream in of_streams]))
    x_streams = torch.stack(own)
    x, post, mix = collapse(x_streams, block, "hc_attn", config)
    x = norm(x, block["attn_norm.weight"], config)
    keys, y = attention(config, block, x, positions)
    x_streams = expand(y, x_streams, post, mix)
    x, post, mix = collapse(x_streams, block, "hc_ffn", config)
    x = norm(x, block["ffn_norm.weight"], config)
    routed = config.num_hidden_layers
    y = experts(x, torch.tensor(list(tokens[1:])), block, config, routed)
    x_streams = expand(y, x_streams, post, mix)
    raw = stream_products(x_streams, block["hc_head_fn"], config)
    pre = torch.sigmoid(raw * block["hc_head_scale"] + block["hc_head_base"]) + config.hc_eps
    readout = (pre[:, :, None] * x_streams).sum(1)
    return NaiveMtp(keys, norm(readout, block["norm.weight"], config) @ head.T)


def attention(
    config: V4Config, block: Weights, x: torch.Tensor, positions: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(keys [S, D], output [S, H]) of the normed rows, each of which sees its window and itself at its end."""
    heads, dim, frequencies = config.num_attention_heads, config.head_dim, rope_frequencies(config, 0)
    latent = norm(x @ block["attn.wq_a.weight"].T, block["attn.q_norm.weight"], config)
    q = norm((latent @ block["attn.wq_b.weight"].T).reshape(-1, heads, dim), 1.0, config)
    q = turn(q, positions, frequencies)
    keys = turn(norm(x @ block["attn.wkv.weight"].T, block["attn.kv_norm.weight"], config), positions, frequencies)
    seen = [range(max(0, p - config.sliding_window + 1), p + 1) for p in positions]
    o = torch.stack([attend(q[p], keys[list(seen[p])], block["attn.attn_sink"]) for p in positions])
    o = turn(o, positions, frequencies, sign=-1).reshape(len(x), config.o_groups, -1)
    down = block["attn.wo_a.weight"].reshape(config.o_groups, config.o_lora_rank, -1)
    latents = [o[:, g] @ down[g].T for g in range(config.o_groups)]
    return keys, torch.cat(latents, dim=1) @ block["attn.wo_b.weight"].T
