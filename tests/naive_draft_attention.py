"""Attention of drafts in loops over rows, heads and keys, in FP64: what the library's is compared with.

Letters: B samples, S context rows, Q block rows, H hidden, D head dim.
"""

import math

import torch


def sees(rule, anchor, keep, offset, own_block, key):
    """key: ("context", position) or ("block", block, offset). The rule of training.md 4.4 in plain numbers."""
    if not keep:
        return False
    if key[0] == "block":
        return key[1] == own_block and (not rule.causal or key[2] <= offset)
    position = key[1]
    if position >= anchor:
        return False
    if rule.context_window is not None and position < anchor - rule.context_window:
        return False
    return rule.sliding_window is None or position > anchor + offset - rule.sliding_window


def key_list(context_positions, blocks, block_size):
    keys = [("context", int(position)) for position in context_positions]
    return keys + [("block", block, offset) for block in range(blocks) for offset in range(block_size)]


def naive_mask(rule, anchors_BN, keep_BN, position_BS, block_size):
    """bool [B, Q, S + Q], one element after another."""
    samples = []
    for anchors, keeps, positions in zip(anchors_BN.tolist(), keep_BN.tolist(), position_BS.tolist(), strict=True):
        keys = key_list(positions, len(anchors), block_size)
        samples.append(
            [
                [sees(rule, anchors[block], keeps[block], offset, block, key) for key in keys]
                for block in range(len(anchors))
                for offset in range(block_size)
            ]
        )
    return torch.tensor(samples)


def norm(x, weight, eps):
    y = x * (x.square().mean() + eps) ** -0.5
    return y if weight is None else y * weight


def turn_neighbours(x, position, dim, theta, sign=1.0):
    """The last dim channels as complex numbers, times e^(i position f)."""
    parts = list(x)
    first = len(parts) - dim
    for pair in range(dim // 2):
        angle = sign * position * theta ** (-2 * pair / dim)
        a, b = parts[first + 2 * pair], parts[first + 2 * pair + 1]
        parts[first + 2 * pair] = a * math.cos(angle) - b * math.sin(angle)
        parts[first + 2 * pair + 1] = a * math.sin(angle) + b * math.cos(angle)
    return torch.stack(parts)


def turn_halves(x, position, dim, theta):
    """The last dim channels, i and i + dim / 2 as a complex number."""
    parts = list(x)
    first = len(parts) - dim
    for pair in range(dim // 2):
        angle = position * theta ** (-2 * pair / dim)
        a, b = parts[first + pair], parts[first + pair + dim // 2]
        parts[first + pair] = a * math.cos(angle) - b * math.sin(angle)
        parts[first + pair + dim // 2] = a * math.sin(angle) + b * math.cos(angle)
    return torch.stack(parts)


def attend_row(q, keys, values, visible, scale, sink):
    """One head of one row; a zero vector where nothing is visible. sink: a number for the denominator, or None."""
    shown = [index for index, sees_it in enumerate(visible) if sees_it]
    if not shown:
        return torch.zeros_like(values[0]) * q.sum()
    scores = [(q * keys[index]).sum() * scale for index in shown]
    total = sum(score.exp() for score in scores) + (0 if sink is None else sink.exp())
    return sum(score.exp() / total * values[index] for score, index in zip(scores, shown, strict=True))


class NaiveRow:
    """What a kind does with one row: queries(row, position), keys(row, position), output(heads, position)."""

    def __init__(self, config, weights):
        self.config, self.weights = config, weights

    def linear(self, x, name):
        y = self.weights[f"{name}.weight"] @ x
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias


class NaiveV4(NaiveRow):
    def queries(self, row, position):
        config, eps = self.config, self.config.rms_norm_eps
        latent = norm(self.linear(row, "q_a_proj"), self.weights["q_a_norm.weight"], eps)
        heads = self.linear(latent, "q_b_proj").chunk(config.num_attention_heads)
        if config.attention_mode == "deepseek_v4":
            heads = [norm(head, None, eps) for head in heads]
        return [turn_neighbours(head, position, config.qk_rope_head_dim, config.rope_theta) for head in heads]

    def keys(self, row, position):
        config = self.config
        kv = norm(self.linear(row, "kv_proj"), self.weights["kv_norm.weight"], config.rms_norm_eps)
        kv = turn_neighbours(kv, position, config.qk_rope_head_dim, config.rope_theta)
        return [kv] * config.num_attention_heads, [kv] * config.num_attention_heads

    def output(self, heads, position):
        config = self.config
        heads = [turn_neighbours(head, position, config.qk_rope_head_dim, config.rope_theta, -1.0) for head in heads]
        each = config.num_attention_heads // config.o_groups
        latents = []
        for group in range(config.o_groups):
            rows = self.weights["o_a_proj.weight"][group * config.o_lora_rank : (group + 1) * config.o_lora_rank]
            latents.append(rows @ torch.cat(heads[group * each : (group + 1) * each]))
        return self.linear(torch.cat(latents), "o_b_proj")


class NaiveGrouped(NaiveRow):
    def head_norm(self, head, name):
        weight = self.weights.get(f"{name}.weight")
        return head if weight is None else norm(head, weight, self.config.rms_norm_eps)

    def queries(self, row, position):
        config = self.config
        heads = self.linear(row, "q_proj").chunk(config.num_attention_heads)
        return [turn_halves(self.head_norm(h, "q_norm"), position, config.head_dim, config.rope_theta) for h in heads]

    def keys(self, row, position):
        config = self.config
        groups, repeat = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
        keys = [self.head_norm(head, "k_norm") for head in self.linear(row, "k_proj").chunk(groups)]
        keys = [turn_halves(head, position, config.head_dim, config.rope_theta) for head in keys]
        values = self.linear(row, "v_proj").chunk(groups)
        return [key for key in keys for _ in range(repeat)], [value for value in values for _ in range(repeat)]

    def output(self, heads, position):
        return self.linear(torch.cat(heads), "o_proj")


class NaiveLatent(NaiveGrouped):
    def queries(self, row, position):
        config = self.config
        if config.q_lora_rank is None:
            whole = self.linear(row, "q_proj")
        else:
            latent = self.linear(row, "q_a_proj")
            latent = norm(latent, self.weights["q_a_layernorm.weight"], config.rms_norm_eps)
            whole = self.linear(latent, "q_b_proj")
        rope = config.qk_rope_head_dim
        return [turn_halves(h, position, rope, config.rope_theta) for h in whole.chunk(config.num_attention_heads)]

    def keys(self, row, position):
        config = self.config
        both = self.linear(row, "kv_a_proj_with_mqa")
        latent, turned = both[: config.kv_lora_rank], both[config.kv_lora_rank :]
        latent = norm(latent, self.weights["kv_a_layernorm.weight"], config.rms_norm_eps)
        turned = turn_halves(turned, position, config.qk_rope_head_dim, config.rope_theta)
        heads = self.linear(latent, "kv_b_proj").chunk(config.num_attention_heads)
        nope = config.qk_nope_head_dim
        return [torch.cat((head[:nope], turned)) for head in heads], [head[nope:] for head in heads]


NAIVE = {
    "gqa": NaiveGrouped,
    "mha": NaiveGrouped,
    "mla": NaiveLatent,
    "deepseek_v4": NaiveV4,
    "deepseek_v41": NaiveV4,
}


def naive_attention(config, rule, weights, hidden_BQH, context_BSH, anchors_BN, keep_BN, position_BS, block_size):
    """[B, Q, H]. weights: the module's parameters by name, so that gradients reach them."""
    kind = NAIVE[config.attention_mode](config, weights)
    sinks = weights.get("sinks")
    mask_BQL = naive_mask(rule, anchors_BN, keep_BN, position_BS, block_size)
    samples = []
    for sample, anchors in enumerate(anchors_BN.tolist()):
        positions = [anchor + offset for anchor in anchors for offset in range(block_size)]
        keys = [kind.keys(row, p) for row, p in zip(context_BSH[sample], position_BS[sample].tolist(), strict=True)]
        keys += [kind.keys(row, p) for row, p in zip(hidden_BQH[sample], positions, strict=True)]
        rows = []
        for index, (row, position) in enumerate(zip(hidden_BQH[sample], positions, strict=True)):
            heads = [
                attend_row(
                    q,
                    [key[0][head] for key in keys],
                    [key[1][head] for key in keys],
                    mask_BQL[sample, index].tolist(),
                    config.head_dim**-0.5,
                    None if sinks is None else sinks[head],
                )
                for head, q in enumerate(kind.queries(row, position))
            ]
            rows.append(kind.output(heads, position))
        samples.append(torch.stack(rows))
    return torch.stack(samples)
