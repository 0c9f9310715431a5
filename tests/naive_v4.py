"""A second V4 target: naive, one sequence at a time, no caches; the arithmetic of the model description row by row.

Legend: S tokens, h streams, H hidden, V vocabulary, N heads, D head dim, E entries, K keys of a row.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from meshspark.models.v4.config import V4Config

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Naive:
    """logits [S, V]; streams of each layer's output [S, h, H]; index_gap [S].

    index_gap: over the ratio-4 layers, the smallest distance between the last score that was chosen and the first
    that was not; infinite for a row that sees all its entries. Below rounding noise, the choice is arbitrary.
    """

    logits: torch.Tensor
    streams: tuple[torch.Tensor, ...]
    index_gap: torch.Tensor


@torch.no_grad()
def naive_forward(
    config: V4Config, weights: Weights, tokens: Sequence[int], dtype: torch.dtype = torch.float64
) -> Naive:
    """The whole forward of one sequence from position 0; weights by official name, experts stacked."""
    wide = {name: w.to(dtype) if w.is_floating_point() else w for name, w in weights.items()}
    ids = torch.tensor(list(tokens))
    streams = wide["embed.weight"][ids][:, None, :].repeat(1, config.hc_mult, 1)
    gap = torch.full((len(ids),), math.inf, dtype=dtype)
    outputs = []
    for layer in range(config.num_hidden_layers):
        block = {k.split(".", 2)[2]: w for k, w in wide.items() if k.startswith(f"layers.{layer}.")}
        x, post, mix = collapse(streams, block, "hc_attn", config)
        y, layer_gap = attention(norm(x, block["attn_norm.weight"], config), block, config, layer)
        gap = torch.minimum(gap, layer_gap)
        streams = expand(y, streams, post, mix)
        x, post, mix = collapse(streams, block, "hc_ffn", config)
        y = experts(norm(x, block["ffn_norm.weight"], config), ids, block, config, layer)
        streams = expand(y, streams, post, mix)
        outputs.append(streams)
    raw = stream_products(streams, wide["hc_head_fn"], config)
    pre = torch.sigmoid(raw * wide["hc_head_scale"] + wide["hc_head_base"]) + config.hc_eps
    hidden = norm((pre[:, :, None] * streams).sum(1), wide["norm.weight"], config)
    return Naive(hidden @ wide["head.weight"].T, tuple(outputs), gap)


def norm(x: torch.Tensor, gain: torch.Tensor | float, config: V4Config) -> torch.Tensor:
    return gain * x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.rms_norm_eps)


def stream_products(streams: torch.Tensor, fn: torch.Tensor, config: V4Config) -> torch.Tensor:
    flat = torch.cat([streams[:, j] for j in range(config.hc_mult)], dim=1)
    return norm(flat, 1.0, config) @ fn.T


def collapse(
    streams: torch.Tensor, block: Weights, place: str, config: V4Config
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x [S, H], post [S, h], C [S, h, h]) of a hyper-connection; C after the Sinkhorn iterations."""
    h, eps = config.hc_mult, config.hc_eps
    scale, base = block[f"{place}_scale"], block[f"{place}_base"]
    m = stream_products(streams, block[f"{place}_fn"], config)
    pre = torch.sigmoid(m[:, :h] * scale[0] + base[:h]) + eps
    post = 2 * torch.sigmoid(m[:, h : 2 * h] * scale[1] + base[h : 2 * h])
    mix = m[:, 2 * h :].reshape(-1, h, h) * scale[2] + base[2 * h :].reshape(h, h)
    mix = torch.softmax(mix, dim=2) + eps
    mix = mix / (mix.sum(1, keepdim=True) + eps)
    for _ in range(config.hc_sinkhorn_iters - 1):
        mix = mix / (mix.sum(2, keepdim=True) + eps)
        mix = mix / (mix.sum(1, keepdim=True) + eps)
    return (pre[:, :, None] * streams).sum(1), post, mix


def expand(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    """New stream k: post_k * y plus old stream j times C[j, k]."""
    new = []
    for k in range(streams.shape[1]):
        mixed = sum(mix[:, j, k, None] * streams[:, j] for j in range(streams.shape[1]))
        new.append(post[:, k, None] * y + mixed)
    return torch.stack(new, dim=1)


def rope_frequencies(config: V4Config, ratio: int) -> list[float]:
    """Angle per position of each pair of rotary channels."""
    d = config.qk_rope_head_dim
    if ratio == 0:
        return [config.rope_theta ** (-2 * i / d) for i in range(d // 2)]
    base = [config.compress_rope_theta ** (-2 * i / d) for i in range(d // 2)]
    yarn = config.yarn
    if yarn.factor == 1:
        return base

    def turns(t: float) -> float:
        return (
            d
            * math.log(yarn.original_max_position_embeddings / (t * 2 * math.pi))
            / (2 * math.log(config.compress_rope_theta))
        )

    low = max(math.floor(turns(yarn.beta_fast)), 0)
    high: float = min(math.ceil(turns(yarn.beta_slow)), d - 1)
    high = high + 0.001 if low == high else high
    ramp = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(d // 2)]
    return [f / yarn.factor * t + f * (1 - t) for f, t in zip(base, ramp, strict=True)]


def turn(x: torch.Tensor, positions: list[int], frequencies: list[float], sign: int = 1) -> torch.Tensor:
    """x [P, ..., D] of these positions, its last channels turned pair by pair; sign -1 turns back."""
    angle = torch.tensor([[p * f for f in frequencies] for p in positions], dtype=torch.float64)
    angle = angle.reshape(len(positions), *[1] * (x.dim() - 2), len(frequencies))
    cos, sin = angle.cos().to(x.dtype), sign * angle.sin().to(x.dtype)
    out, start = x.clone(), x.shape[-1] - 2 * len(frequencies)
    a, b = x[..., start::2], x[..., start + 1 :: 2]
    out[..., start::2] = a * cos - b * sin
    out[..., start + 1 :: 2] = a * sin + b * cos
    return out


def compress(x: torch.Tensor, weights: Weights, prefix: str, config: V4Config, ratio: int) -> torch.Tensor:
    """Entries [S // ratio, width]: pooled per channel, normed, turned at the position of their first token."""
    ape, gain = weights[f"{prefix}ape"], weights[f"{prefix}norm.weight"]
    width = len(gain)
    k = x @ weights[f"{prefix}wkv.weight"].T
    z = x @ weights[f"{prefix}wgate.weight"].T + torch.stack([ape[p % ratio] for p in range(len(x))])
    frequencies = rope_frequencies(config, ratio)
    entries = []
    for w in range(len(x) // ratio):
        now, before = slice(ratio * w, ratio * (w + 1)), slice(ratio * (w - 1), ratio * w)
        if ratio != 4:
            keys, gates = k[now], z[now]
        else:
            keys, gates = k[now, width:], z[now, width:]
            if w > 0:
                keys = torch.cat((k[before, :width], keys))
                gates = torch.cat((z[before, :width], gates))
        pooled = (torch.softmax(gates, dim=0) * keys).sum(0)
        entries.append(norm(pooled, gain, config))
    stacked = torch.stack(entries) if entries else x.new_zeros(0, width)
    return turn(stacked, [ratio * w for w in range(len(stacked))], frequencies)


def index_choice(
    x: torch.Tensor, latent: torch.Tensor, block: Weights, config: V4Config
) -> tuple[list[list[int]], list[float]]:
    """For each row the chosen entries (higher score, then lower index), and the gap to the first one left out."""
    heads, width = config.index_n_heads, config.index_head_dim
    frequencies = rope_frequencies(config, 4)
    keys = compress(x, block, "attn.indexer.compressor.", config, 4)
    queries = (latent @ block["attn.indexer.wq_b.weight"].T).reshape(-1, heads, width)
    queries = turn(queries, list(range(len(x))), frequencies)
    head_weights = x @ block["attn.indexer.weights_proj.weight"].T
    chosen, gaps = [], []
    for p in range(len(x)):
        visible = (p + 1) // 4
        dots = torch.relu(queries[p] @ keys[:visible].T) * width**-0.5
        scores = (head_weights[p][:, None] * heads**-0.5 * dots).sum(0).tolist()
        order = sorted(range(visible), key=lambda w: (-scores[w], w))
        chosen.append(order[: config.index_topk])
        binds = visible > config.index_topk
        last = config.index_topk
        gaps.append(scores[order[last - 1]] - scores[order[last]] if binds else math.inf)
    return chosen, gaps


def attention(x: torch.Tensor, block: Weights, config: V4Config, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(y [S, H], index gap [S]) of normed x."""
    ratio, heads, width = config.compress_ratios[layer], config.num_attention_heads, config.head_dim
    positions = list(range(len(x)))
    frequencies = rope_frequencies(config, ratio)
    latent = norm(x @ block["attn.wq_a.weight"].T, block["attn.q_norm.weight"], config)
    q = norm((latent @ block["attn.wq_b.weight"].T).reshape(-1, heads, width), 1.0, config)
    q = turn(q, positions, frequencies)
    kv = turn(norm(x @ block["attn.wkv.weight"].T, block["attn.kv_norm.weight"], config), positions, frequencies)
    entries = compress(x, block, "attn.compressor.", config, ratio) if ratio else kv[:0]
    chosen, gaps = [list(range((p + 1) // ratio)) if ratio else [] for p in positions], [math.inf] * len(x)
    if ratio == 4:
        chosen, gaps = index_choice(x, latent, block, config)
    rows = []
    for p in positions:
        window = kv[max(0, p - config.sliding_window + 1) : p + 1]
        keys_KD = torch.cat((window, entries[chosen[p]]))
        rows.append(attend(q[p], keys_KD, block["attn.attn_sink"]))
    unturned = turn(torch.stack(rows), positions, frequencies, sign=-1)
    grouped = unturned.reshape(len(x), config.o_groups, -1)
    down = block["attn.wo_a.weight"].reshape(config.o_groups, config.o_lora_rank, -1)
    latents = [grouped[:, j] @ down[j].T for j in range(config.o_groups)]
    return torch.cat(latents, dim=1) @ block["attn.wo_b.weight"].T, torch.tensor(gaps, dtype=x.dtype)


def attend(q_ND: torch.Tensor, keys_KD: torch.Tensor, sink_N: torch.Tensor) -> torch.Tensor:
    """One row's heads over keys that are also the values; the sink takes its share and gives nothing."""
    z = q_ND @ keys_KD.T * q_ND.shape[1] ** -0.5
    top = torch.maximum(z.amax(1), sink_N)[:, None]
    weight = torch.exp(z - top)
    return weight @ keys_KD / (weight.sum(1, keepdim=True) + torch.exp(sink_N[:, None] - top))


def swiglu(x: torch.Tensor, w1: torch.Tensor, w3: torch.Tensor, w2: torch.Tensor, limit: float) -> torch.Tensor:
    gate, up = torch.minimum(x @ w1.T, torch.tensor(limit, dtype=x.dtype)), (x @ w3.T).clamp(-limit, limit)
    return (gate / (1 + torch.exp(-gate)) * up) @ w2.T


def experts(x: torch.Tensor, ids: torch.Tensor, block: Weights, config: V4Config, layer: int) -> torch.Tensor:
    """The mixture [S, H] of normed x: shared expert plus the routed ones, each by its own weight."""
    logit = x @ block["ffn.gate.weight"].T
    scores = torch.sqrt(torch.clamp(logit, min=0) + torch.log1p(torch.exp(-logit.abs())))
    shared = [block[f"ffn.shared_experts.{w}.weight"] for w in ("w1", "w3", "w2")]
    out = swiglu(x, shared[0], shared[1], shared[2], config.swiglu_limit)
    stacks = [block[f"ffn.experts.{w}.weight"] for w in ("w1", "w3", "w2")]
    if config.is_hash_layer(layer):
        picked = block["ffn.gate.tid2eid"][ids].tolist()
    else:
        ranked = (scores + block["ffn.gate.bias"]).tolist()
        k = config.num_experts_per_tok
        picked = [sorted(range(len(row)), key=lambda e, row=row: (-row[e], e))[:k] for row in ranked]
    weights = torch.zeros_like(scores)
    for s, chosen in enumerate(picked):
        weights[s, chosen] = scores[s, chosen] / (scores[s, chosen].sum() + 1e-20) * config.routed_scaling_factor
    for e in range(config.n_routed_experts):
        one = swiglu(x, stacks[0][e], stacks[1][e], stacks[2][e], config.swiglu_limit)
        out = out + weights[:, e, None] * one
    return out
