"""A second DSpark drafter: naive, one request and one row at a time, no pool; the arithmetic of the description.

Legend: S context positions, M stages, R rows of the block, V vocabulary, H hidden, D head dim.
"""

from dataclasses import dataclass

import torch
from naive_v4 import Weights, attend, collapse, expand, experts, norm, rope_frequencies, stream_products, turn

from meshspark.models.v4.config import V4Config


@dataclass(frozen=True)
class NaiveDraft:
    """stage_out [M][R, h, H]; readout [R, H]; base, corrected [gamma, V]; drafts; confidence [gamma] logits."""

    stage_out: tuple[torch.Tensor, ...]
    readout: torch.Tensor
    base: torch.Tensor
    corrected: torch.Tensor
    drafts: list[int]
    confidence: torch.Tensor


def stage_weights(weights: Weights, stage: int) -> Weights:
    prefix = f"mtp.{stage}."
    return {name.removeprefix(prefix): w.double() for name, w in weights.items() if name.startswith(prefix)}


def naive_context(config: V4Config, weights: Weights, taps: torch.Tensor, group: int = 0) -> torch.Tensor:
    """Context rows [M, S, D] of positions 0 to S - 1 from taps [S, layers * H]."""
    first = stage_weights(weights, 0)
    main = norm(taps.double() @ first["main_proj.weight"].T, first["main_norm.weight"], config)
    stages = [stage_weights(weights, stage) for stage in range(len(config.draft_ratios))]
    return torch.stack([key_rows(config, block, main, list(range(len(main))), group) for block in stages])


def key_rows(config: V4Config, block: Weights, x: torch.Tensor, positions: list[int], group: int) -> torch.Tensor:
    kv = norm(x @ block["attn.wkv.weight"].T, block["attn.kv_norm.weight"], config)
    kv = turn(kv, positions, rope_frequencies(config, 0))
    return through_fp8(kv, config.head_dim - config.qk_rope_head_dim, group) if group else kv


def through_fp8(kv: torch.Tensor, plain: int, group: int) -> torch.Tensor:
    """The first `plain` channels of each row to the nearest e4m3 number times a power of two for each group."""
    grid = [0.0] + [2.0**-9 * m for m in range(1, 8)] + [2.0**e * (1 + m / 8) for e in range(-6, 9) for m in range(8)]
    grid = grid[:-1]
    out = kv.clone()
    for row in out:
        for start in range(0, plain, group):
            values = row[start : start + group].tolist()
            largest, exponent = max(max(map(abs, values)), 1e-4), -40
            while 448 * 2.0**exponent < largest:
                exponent += 1
            for offset, value in enumerate(values):
                scaled = min(abs(value) / 2.0**exponent, 448.0)
                # Of two equally near ones the even code is taken.
                code = min(range(len(grid)), key=lambda c, scaled=scaled: (abs(grid[c] - scaled), c % 2))
                row[start + offset] = (1 if value >= 0 else -1) * grid[code] * 2.0**exponent
    return out


def naive_draft(
    config: V4Config, weights: Weights, context: torch.Tensor, anchor: int, gamma: int, rows: int, group: int = 0
) -> NaiveDraft:
    """The block behind context rows [M, S, D] of positions 0 to S - 1: the anchor at position S, then noise."""
    assert config.dspark is not None
    S, stages = context.shape[1], len(config.draft_ratios)
    positions = list(range(S, S + rows))
    embed, head = weights["embed.weight"].double(), weights["head.weight"].double()
    ids = torch.tensor([anchor] + [config.dspark.noise_token_id] * (rows - 1))
    streams = embed[ids][:, None, :].repeat(1, config.hc_mult, 1)
    outputs = []
    for stage in range(stages):
        block = stage_weights(weights, stage)
        x, post, mix = collapse(streams, block, "hc_attn", config)
        y = attention(config, block, norm(x, block["attn_norm.weight"], config), context[stage], positions, group)
        streams = expand(y, streams, post, mix)
        x, post, mix = collapse(streams, block, "hc_ffn", config)
        x = norm(x, block["ffn_norm.weight"], config)
        y = experts(x, ids, block, config, config.num_hidden_layers)
        streams = expand(y, streams, post, mix)
        outputs.append(streams)
    last = stage_weights(weights, stages - 1)
    raw = stream_products(streams, last["hc_head_fn"], config)
    pre = torch.sigmoid(raw * last["hc_head_scale"] + last["hc_head_base"]) + config.hc_eps
    readout = (pre[:, :, None] * streams).sum(1)
    base = norm(readout, last["norm.weight"], config) @ head.T
    w1, w2 = (last[f"markov_head.markov_w{number}.weight"] for number in (1, 2))
    w = last["confidence_head.proj.weight"][0]
    previous, drafts, corrected, confidence = anchor, [], [], []
    for b in range(gamma):
        corrected.append(base[b] + w2 @ w1[previous])
        confidence.append(w @ torch.cat((readout[b], w1[previous])))
        previous = int(corrected[-1].argmax())
        drafts.append(previous)
    return NaiveDraft(tuple(outputs), readout, base[:gamma], torch.stack(corrected), drafts, torch.stack(confidence))


def attention(
    config: V4Config, block: Weights, x: torch.Tensor, context: torch.Tensor, positions: list[int], group: int
) -> torch.Tensor:
    """[R, H] of the normed rows: each sees the newest window of context rows and the whole block."""
    heads, dim, frequencies = config.num_attention_heads, config.head_dim, rope_frequencies(config, 0)
    latent = norm(x @ block["attn.wq_a.weight"].T, block["attn.q_norm.weight"], config)
    q = norm((latent @ block["attn.wq_b.weight"].T).reshape(-1, heads, dim), 1.0, config)
    q = turn(q, positions, frequencies)
    own = key_rows(config, block, x, positions, group)
    keys = torch.cat((context[-config.sliding_window :], own))
    o = torch.stack([attend(q[b], keys, block["attn.attn_sink"]) for b in range(len(x))])
    o = turn(o, positions, frequencies, sign=-1).reshape(len(x), config.o_groups, -1)
    down = block["attn.wo_a.weight"].reshape(config.o_groups, config.o_lora_rank, -1)
    latents = [o[:, g] @ down[g].T for g in range(config.o_groups)]
    return torch.cat(latents, dim=1) @ block["attn.wo_b.weight"].T
