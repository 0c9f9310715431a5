"""Reference rules that others have broken: rotary policy, entry positions, index choice, routing, ties."""

import math
from dataclasses import replace

import pytest
import torch

from meshspark.comm.logits import return_best
from meshspark.layouts.rows import RequestRows
from meshspark.models.checkpoint.synthetic import random_weights
from meshspark.models.numerics import FLOAT64
from meshspark.models.v4.caches import poison
from meshspark.models.v4.config import V4Config, flash, from_config_json
from meshspark.models.v4.indexer import select, selected_entries
from meshspark.models.v4.model import Model, Tap
from meshspark.models.v4.moe import (
    ExpertWeights,
    HashRouter,
    MoELayer,
    clamped_swiglu,
    routed_experts,
    shared_expert,
)
from meshspark.models.v4.pools import CacheShape
from meshspark.models.v4.rope import angles, frequencies, rotate
from meshspark.parallel.groups import Groups

POSITIONS = (0, 1, 127, 128, 65535, 65536, 1048575)
INF, NAN = math.inf, math.nan


def plain(theta: float, dim: int) -> list[float]:
    return [theta ** (-2 * i / dim) for i in range(dim // 2)]


def yarned(theta: float, dim: int, factor: float, original: int, fast: float, slow: float) -> list[float]:
    """Pairs that turn more than `fast` times in the original context stay, those below `slow` are divided."""
    low, high = (dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (fast, slow))
    low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
    ramp = [min(1.0, max(0.0, (i - low) / (high - low))) for i in range(dim // 2)]
    return [f * (1 - t) + f / factor * t for f, t in zip(plain(theta, dim), ramp, strict=True)]


FLASH_RATES = {
    0: plain(10000.0, 64),
    4: yarned(160000.0, 64, 16.0, 65536, 32.0, 1.0),
    128: yarned(160000.0, 64, 16.0, 65536, 32.0, 1.0),
}


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_inverse_frequencies(ratio: int) -> None:
    ours = frequencies(flash(), ratio)
    expected = torch.tensor(FLASH_RATES[ratio], dtype=torch.float64)
    assert ours.dtype == torch.float64
    torch.testing.assert_close(ours, expected, rtol=1e-14, atol=0)
    if ratio:
        base = torch.tensor(plain(160000.0, 64), dtype=torch.float64)
        torch.testing.assert_close(ours[:16], base[:16], rtol=1e-14, atol=0)
        torch.testing.assert_close(ours[25:], base[25:] / 16, rtol=1e-14, atol=0)


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_cos_and_sin_at_far_positions(ratio: int) -> None:
    cos, sin = angles(torch.tensor(POSITIONS), frequencies(flash(), ratio), torch.float32)
    for row, position in enumerate(POSITIONS):
        for pair, rate in enumerate(FLASH_RATES[ratio]):
            assert abs(float(cos[row, pair]) - math.cos(position * rate)) <= 1e-6, (position, pair)
            assert abs(float(sin[row, pair]) - math.sin(position * rate)) <= 1e-6, (position, pair)


@pytest.mark.parametrize("extra", [(), (0,), (0, 0, 0)])
def test_extra_ratios_belong_to_the_drafter(extra: tuple[int, ...]) -> None:
    raw = flash().to_json()
    raw["compress_ratios"] = [0, 0, *[4, 128] * 20, 4, *extra]
    config = from_config_json(raw)
    assert len(config.compress_ratios) == 43 and config.compress_ratios[42] == 4
    assert config.draft_ratios == extra


@pytest.mark.parametrize("ratios", [[0, 0] + [4, 128] * 20, [], [0, 0] + [4, 128] * 20 + [8]])
def test_short_or_unknown_ratios_are_refused(ratios: list[int]) -> None:
    raw = flash().to_json()
    raw["compress_ratios"] = ratios
    with pytest.raises(ValueError, match="compress_ratios"):
        from_config_json(raw)


WIDTH, ROTARY, FILLER, MARK = 32, 16, 0, 1
"""Of the probe model; MARK is the token whose entry has a value, FILLER's entries are zero."""


def probe(ratio: int, topk: int = 4096) -> tuple[V4Config, dict[str, torch.Tensor]]:
    """One layer, one head, no window values, no experts: the layer adds the attention output to the embedding.

    Every stream is embedding + output. Only entries pooled from MARK tokens have a value, and their index keys
    alone are not zero, so a MARK query scores them above all others.
    """
    config = V4Config(
        hidden_size=WIDTH, num_hidden_layers=1, vocab_size=8, num_attention_heads=1, head_dim=WIDTH,
        qk_rope_head_dim=ROTARY, q_lora_rank=WIDTH, o_groups=1, o_lora_rank=WIDTH, sliding_window=1,
        compress_ratios=(ratio,), draft_ratios=(), index_n_heads=24, index_head_dim=WIDTH, index_topk=topk,
        moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=1, num_hash_layers=0, hc_eps=1e-14,
        rms_norm_eps=1e-14, max_position_embeddings=4096,
    )  # fmt: skip
    weights = dict(random_weights(config, 3, FLOAT64))
    eye = torch.eye(WIDTH, dtype=torch.float64)
    for name, tensor in weights.items():
        if name.endswith(("norm.weight",)):
            weights[name] = torch.ones_like(tensor)
        elif name.endswith(("wq_a.weight", "attn.wq_b.weight", "wo_a.weight", "wo_b.weight")) and "indexer" not in name:
            weights[name] = eye
        elif name.endswith(("attn.wkv.weight", "w2.weight", "_fn", "_base", "ape", "wgate.weight", "attn_sink")):
            weights[name] = torch.zeros_like(tensor)
        elif name.endswith("compressor.wkv.weight"):
            weights[name] = only_mark(tensor, ratio)
        elif name.endswith("weights_proj.weight"):
            weights[name] = torch.zeros_like(tensor).index_fill(1, torch.tensor([WIDTH - 1]), 1.0)
    weights["embed.weight"] = embeddings(weights["embed.weight"])
    return config, weights


def only_mark(wkv: torch.Tensor, ratio: int) -> torch.Tensor:
    """Reads the last channel alone, which only MARK has; at ratio 4 only into the half of an entry's own window."""
    out = torch.zeros_like(wkv)
    own = slice(wkv.shape[0] // 2, None) if ratio == 4 else slice(None)
    out[own, -1] = wkv[own, 0] + 0.1
    return out


def embeddings(embed: torch.Tensor) -> torch.Tensor:
    out = embed.clone()
    out[:, -1] = 0
    out[MARK, -1] = 1.0
    return out


def turned(x: torch.Tensor, angle: float, ratio: int) -> torch.Tensor:
    """x with its rotary pairs multiplied by e^(i * angle * rate), in complex numbers."""
    rates = plain(10000.0, ROTARY) if ratio == 0 else yarned(160000.0, ROTARY, 16.0, 65536, 32.0, 1.0)
    pairs = torch.view_as_complex(x[-ROTARY:].reshape(-1, 2).contiguous())
    factor = torch.tensor([complex(math.cos(angle * r), math.sin(angle * r)) for r in rates], dtype=torch.complex128)
    turn = torch.view_as_real(pairs * factor).flatten()
    return torch.cat((x[:-ROTARY], turn))


def rms1(x: torch.Tensor) -> torch.Tensor:
    return x / x.square().mean().sqrt()


def mark_value(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """The normed value of an entry of MARK tokens, before rotation."""
    return rms1(weights["layers.0.attn.compressor.wkv.weight"][-WIDTH:, -1])


def expected_output(
    query: torch.Tensor, value: torch.Tensor, position: int, entry: int, ratio: int, zeros: int
) -> torch.Tensor:
    """One entry with a value among `zeros` keys that are zero (window, other entries, and the sink of logit 0)."""
    relative = turned(value, ratio * entry - position, ratio)
    weight = math.exp(float(query @ relative) * WIDTH**-0.5)
    return relative * weight / (weight + zeros)


def outputs(model: Model, weights: dict[str, torch.Tensor], tokens: list[int]) -> torch.Tensor:
    tap = Tap(0, "streams")
    with torch.no_grad():
        streams = model.forward(model.plan_sequences([tokens]), taps=[tap]).taps[tap]
    return streams[:, 0] - weights["embed.weight"][tokens]


@pytest.mark.parametrize("entry", [0, 1, 17])
@pytest.mark.parametrize("ratio", [4, 128])
def test_output_is_the_relative_rotation_of_an_entry(ratio: int, entry: int) -> None:
    """Entry w turns as its first token, the output turns back by the query, the scale is head_dim^-0.5 alone."""
    config, weights = probe(ratio)
    model = Model(config, weights, Groups.single(), FLOAT64)
    tokens = [FILLER] * (ratio * entry) + [MARK] * ratio + [FILLER] * 5
    ours = outputs(model, weights, tokens)
    query = rms1(weights["embed.weight"][FILLER])
    first = ratio * (entry + 1) - 1
    assert ours[:first].abs().max() < 1e-10
    for position in range(first + 1, len(tokens)):
        visible = (position + 1) // ratio
        expected = expected_output(query, mark_value(weights), position, entry, ratio, zeros=visible - 1 + 2)
        torch.testing.assert_close(ours[position], expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("entry", [0, 1, 17])
@pytest.mark.parametrize("ratio", [4, 128])
def test_rotate_and_back_is_relative(ratio: int, entry: int) -> None:
    config = replace(flash(), head_dim=WIDTH, index_head_dim=WIDTH, qk_rope_head_dim=ROTARY)
    rates = frequencies(config, ratio)
    x = torch.randn(WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(entry))
    for position in (ratio * entry + ratio - 1, 5000, 1048575):
        key = rotate(x[None], *angles(torch.tensor([ratio * entry]), rates, torch.float64))
        back = rotate(key, *angles(torch.tensor([position]), rates, torch.float64), inverse=True)
        torch.testing.assert_close(back[0], turned(x, ratio * entry - position, ratio), atol=1e-9, rtol=0)


VISIBLE = torch.arange(24) < 20


def chosen(scores: torch.Tensor, count: int = 8, visible: torch.Tensor = VISIBLE) -> list[int]:
    """The chosen entries of one row; also checks the form of the answer."""
    mask = select(scores[None, None], visible[None, None], count)
    listed = selected_entries(mask, count)[0, 0].tolist()
    real = [e for e in listed if e != -1]
    assert len(listed) == count and len(set(real)) == len(real) and listed[: len(real)] == sorted(real)
    assert mask[0, 0].nonzero().flatten().tolist() == real
    assert all(visible[e] for e in real)
    return real


def test_nan_never_wins_and_infinities_keep_their_order() -> None:
    scores = torch.linspace(1, 2, 24)
    scores[[3, 19, 21]] = NAN
    scores[[5, 22]] = INF
    scores[[7, 18]] = -INF
    assert chosen(scores) == [5, 11, 12, 13, 14, 15, 16, 17]


def test_rows_with_too_few_numbers_are_padded() -> None:
    scores = torch.full((24,), NAN)
    assert chosen(scores) == []
    scores[[2, 6]] = torch.tensor([-INF, 1.0])
    scores[23] = INF
    assert chosen(scores) == [2, 6]
    assert chosen(torch.full((24,), -INF)) == list(range(8))
    assert chosen(torch.full((24,), INF)) == list(range(8))
    assert chosen(torch.zeros(24), visible=torch.zeros(24, dtype=torch.bool)) == []


def test_equal_scores_go_to_the_lower_index() -> None:
    scores = torch.zeros(24)
    scores[[1, 10, 19, 20]] = torch.tensor([-1.0, 1.0, 1.0, 9.0])
    assert chosen(scores) == [0, 2, 3, 4, 5, 6, 10, 19]
    signed = torch.zeros(24)
    signed[::2] = -0.0
    assert chosen(signed) == list(range(8))


@pytest.mark.parametrize("start", [0, 4, 124, 128, 512, 2048])
def test_newest_visible_entry_can_be_selected(start: int) -> None:
    positions = torch.arange(start, start + 64)
    visible = (positions + 1) // 4
    entries = torch.arange((start + 64) // 4)
    scores = entries.float().expand(64, -1)
    mask = select(scores[None], (entries < visible[:, None])[None], 3)[0]
    for row, count in enumerate(visible.tolist()):
        assert mask[row].nonzero().flatten().tolist() == list(range(max(0, count - 3), count))


@pytest.mark.parametrize("start", [0, 4, 124, 128, 512, 2048])
@torch.no_grad()
def test_suffix_prefill_attends_the_newest_entry(start: int) -> None:
    """top-k 1 and a chunk that ends in a MARK entry: only who scores all entries up to the row's own finds it."""
    config, weights = probe(4, topk=1)
    model, length = Model(config, weights, Groups.single(), FLOAT64), start + 64
    tokens = [FILLER] * (length - 4) + [MARK] * 4
    caches = model.make_caches(CacheShape(1, length, max(start, 64)))
    poison(caches)
    caches.admit(0, length)
    tap = Tap(0, "streams")
    for first, end in [(0, start), (start, length)] if start else [(0, length)]:
        rows = RequestRows(0, first, tokens[first:end], kind="prefill", asked=[0])
        streams = model.forward(model.plan([rows], caches), caches, taps=[tap]).taps[tap]
    ours = streams[:, 0] - weights["embed.weight"][tokens[start:]]
    assert ours[:-1].abs().max() < 1e-10
    query = rms1(weights["embed.weight"][MARK])
    expected = expected_output(query, mark_value(weights), length - 1, length // 4 - 1, 4, zeros=2)
    torch.testing.assert_close(ours[-1], expected, atol=1e-10, rtol=0)


def test_hash_routing_weighs_by_the_gate() -> None:
    gate = torch.eye(8)
    table = torch.zeros(10, 6, dtype=torch.int64)
    table[5] = torch.tensor([7, 0, 3, 2, 6, 1])
    x = torch.tensor([[2.0, -1.0, 0.5, 0.0, 9.0, 9.0, -3.0, 1.0]])
    scores, indices, weights = HashRouter(gate, table, 1.5).forward(x, torch.tensor([5]))
    raw = [math.sqrt(math.log1p(math.exp(v))) for v in (1.0, 2.0, 0.0, 0.5, -3.0, -1.0)]
    assert indices.tolist() == [[7, 0, 3, 2, 6, 1]]
    torch.testing.assert_close(weights, torch.tensor([[1.5 * v / sum(raw) for v in raw]]), atol=1e-6, rtol=0)
    assert abs(float(weights.sum()) - 1.5) <= 1e-6
    assert abs(float(scores[0, 4]) - math.sqrt(9.0 + math.log1p(math.exp(-9.0)))) <= 1e-6


def silu(v: float) -> float:
    return v / (1 + math.exp(-v))


CLAMPED = [(100.0, 100.0, silu(10.0) * 10), (100.0, -100.0, silu(10.0) * -10), (-100.0, 100.0, silu(-100.0) * 10)]
CLAMPED += [(-20.0, 1.0, silu(-20.0)), (3.0, -4.0, silu(3.0) * -4), (10.0, 10.0, silu(10.0) * 10)]


@pytest.mark.parametrize(("gate", "up", "expected"), CLAMPED)
def test_clamps_of_every_expert(gate: float, up: float, expected: float) -> None:
    """The gate is clamped from above only; routed and shared experts alike."""

    def scalar(value: float) -> torch.Tensor:
        return torch.tensor([[value]], dtype=torch.float64)

    one = scalar(1.0)
    tolerance = {"rtol": 1e-12, "atol": 1e-60}
    torch.testing.assert_close(clamped_swiglu(scalar(gate), scalar(up), 10.0), scalar(expected), **tolerance)
    shared = shared_expert(one, ExpertWeights(scalar(gate), scalar(up), one), 10.0, torch.float64, torch.float64)
    torch.testing.assert_close(shared, scalar(expected), **tolerance)
    stacked = ExpertWeights(scalar(gate)[None], scalar(up)[None], one[None])
    routed = routed_experts(one, torch.tensor([0.25], dtype=torch.float64), [1], stacked, 10.0)
    torch.testing.assert_close(routed, scalar(0.25 * expected), **tolerance)


def test_same_token_gives_the_same_bits_anywhere_in_a_batch() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    table = torch.tensor([[e % 4, (e + 1) % 4] for e in range(10)])
    experts = ExpertWeights(draw(4, 8, 16), draw(4, 8, 16), draw(4, 16, 8))
    shared = ExpertWeights(draw(8, 16), draw(8, 16), draw(16, 8))
    layer = MoELayer(HashRouter(draw(4, 16), table, 1.5), experts, shared, 4, 10.0, torch.float32)
    token, other = draw(1, 16), draw(5, 16)
    x = torch.cat((token, other[:3], token, other[3:]))
    ids = torch.tensor([5, 1, 2, 3, 5, 9, 5])
    y, _ = layer.forward(x, ids, torch.ones(7, dtype=torch.bool), Groups.single().ep)
    alone, _ = layer.forward(token, ids[:1], torch.ones(1, dtype=torch.bool), Groups.single().ep)
    assert torch.equal(y[0], y[4]) and torch.equal(y[0], alone[0])
    assert not torch.equal(y[0], y[6])


@pytest.mark.parametrize("vocabulary", [101, 128, 1024])
@pytest.mark.parametrize("low", [-3, 0])
def test_equal_logits_go_to_the_lowest_id(vocabulary: int, low: int) -> None:
    """Few different values, so nearly every row is a tie; low -3 has negative logits only."""
    rows = 17
    logits = torch.randint(low, low + 2, (rows, vocabulary), generator=torch.Generator().manual_seed(1)).float()
    logits[0] = low
    logits[1, [vocabulary - 1, 70, 33]] = low + 5.0
    ids, values = return_best(logits, 0, [0] * rows, Groups.single().tp, stage="best")
    for row in range(rows):
        best = max(logits[row].tolist())
        assert int(ids[row]) == logits[row].tolist().index(best) and float(values[row]) == best
    assert ids[:2].tolist() == [0, 33]
    assert return_best(logits[:0], 0, [], Groups.single().tp, stage="best")[0].shape == (0,)
