"""The quantised stages of the model against plain formulas of model.md 9.2, at rows that try them.

Products of the oracle are whole-number sums in FP64. Where a stage has nothing but sums and products, the oracle does
the same FP32 roundings with numpy, and bits are demanded: so the order of scales and of the tree is seen, too.
"""

import contextlib
import dataclasses
import math
from unittest import mock

import numpy as np
import pytest
import torch
from fixture_runs import SMALL, passed

from meshspark.launch.fixtures import stages, stages_scene
from meshspark.launch.fixtures.stages_int8 import crafted_rows
from meshspark.layouts.bits import same_bits
from meshspark.models.int8.linear import int8_linear, int8_weight
from meshspark.models.int8.quantise import QuantisedRows, quantise_rows, quantise_weight
from meshspark.models.matrix import DenseWeight
from meshspark.models.v4 import indexer, moe, output
from meshspark.models.v4.compressor import CompressorWeights
from meshspark.models.v4.config import tiny
from meshspark.models.v4.projections import ProjectionWeights, queries, query_latent
from meshspark.models.v4.rope import angles, frequencies
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

CONFIG = tiny()
MANY = 130
LIMIT = 10.0


def noise(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def coded_weight(seed, *shape):
    return int8_weight(*quantise_weight(noise(seed, *shape) * shape[-1] ** -0.5))


def code(x):
    """(codes, scales) of rows in numpy FP32."""
    x = x.numpy().astype(np.float32)
    inverse = np.float32(127) / np.maximum(np.abs(x).max(axis=-1), np.float32(1e-4))
    return np.rint(x * inverse[:, None]).astype(np.float64), np.float32(1) / inverse


# The output projection.


def _identity_projection(scale_H):
    """wo_a that gives each group's first columns as they are, and random codes of wo_b."""
    ranks, columns = CONFIG.o_lora_rank, CONFIG.group_columns
    wo_a = torch.zeros(CONFIG.o_groups, ranks, columns, dtype=torch.bfloat16)
    wo_a[:, range(ranks), range(ranks)] = 1
    codes = torch.randint(-127, 128, (CONFIG.hidden_size, CONFIG.o_groups * ranks), dtype=torch.int8)
    return wo_a.flatten(0, 1), codes, scale_H


def _latents():
    """Rows [T, G, O] that BF16 holds: zeros, one group of zeros, an outlier of one group, halves between codes."""
    groups, ranks = CONFIG.o_groups, CONFIG.o_lora_rank
    rows = noise(1, 9, groups, ranks).bfloat16().float()
    rows[0] = 0
    rows[1, 3] = 0
    rows[2, 5, 7] = 2.0**20
    # 254 is the largest: half of it is 127 / 2, and odd numbers lie halfway between two codes.
    rows[3] = (torch.arange(ranks) * 2 + 1).float()
    rows[3, :, 0] = 254
    rows[4] = -rows[3]
    # Below the floor in one group, and signed zeros.
    rows[5, 1] = 2.0**-30
    rows[6] = -0.0
    rows[7] = 2.0**-30
    return rows


def _heads(latent_TGO):
    heads = torch.zeros(len(latent_TGO), CONFIG.o_groups, CONFIG.group_columns)
    heads[:, :, : CONFIG.o_lora_rank] = latent_TGO
    return heads.view(len(latent_TGO), CONFIG.num_attention_heads, CONFIG.head_dim)


def _tree(parts):
    """[lo, mid) + [mid, hi), in FP32."""
    if len(parts) == 1:
        return parts[0]
    middle = len(parts) // 2
    return _tree(parts[:middle]) + _tree(parts[middle:])


def _projected(latent_TGO, codes_HX, scale_H):
    """FP32 [T, H] in the order of deployment.md 5: row scales, the tree over groups, channel scales."""
    codes_HGO = codes_HX.view(len(codes_HX), CONFIG.o_groups, -1).numpy().astype(np.float64)
    parts = []
    for group in range(CONFIG.o_groups):
        row_codes, row_scale = code(latent_TGO[:, group])
        parts.append((row_codes @ codes_HGO[:, group].T).astype(np.float32) * row_scale[:, None])
    return torch.from_numpy(_tree(parts) * scale_H.numpy())


def project_here(groups, plant=""):
    """This rank's result of both forms, and the oracle's, all rows on every rank."""
    torch.manual_seed(3)
    scale_H = torch.rand(CONFIG.hidden_size) / 100
    wo_a, codes, scale_H = _identity_projection(scale_H)
    latent = _latents()
    topology, tp_rank = groups.topology, groups.tp.rank
    own = CONFIG.o_groups // topology.tp
    rows = slice(own * tp_rank * CONFIG.o_lora_rank, own * (tp_rank + 1) * CONFIG.o_lora_rank)
    shard = wo_a[rows].contiguous(), codes[:, rows].contiguous()
    weights = output.output_weights(*shard, scale_H, own, CONFIG, torch.float32)
    # In FP32, for the last rounding to BF16 would hide the order of those before.
    weights = dataclasses.replace(weights, activation=torch.float32)
    with _channel_scale_first() if plant else contextlib.nullcontext():
        got = [
            output.project_output(_heads(latent), weights, CONFIG, groups.tp, gather_weights=travel)
            for travel in (False, True)
        ]
    return [same_bits(each, _projected(latent, codes, scale_H)) for each in got]


def _channel_scale_first():
    partials = output.Int8Form.partials

    def early(self, heads, watch):
        return partials(self, heads, watch) * self.b.scale_XO[0]

    return mock.patch.multiple(output.Int8Form, partials=early, finish=lambda self, total: total)


def test_the_output_projection_has_the_bits_of_plain_formulas():
    assert project_here(Groups.single()) == [True, True]


def test_a_channel_scale_before_the_sum_is_seen():
    assert project_here(Groups.single(), "channel scale first") == [False, False]


@pytest.mark.parametrize("tp", [2, 4])
def test_the_sharded_output_projection_has_the_same_bits(ranks, tp):
    results = ranks.run(Topology(tp, tp, tp), "test_int8_stages:project_here", 60)
    assert results == [[True, True]] * tp


# Experts.


def _silu(x):
    return x / (1 + math.exp(-x))


def _clamped_expert():
    """An expert whose gate and up are the codes of its rows' first two columns, and whose w2 gives codes back."""
    w1, w3 = torch.zeros(4, 8, dtype=torch.int8), torch.zeros(4, 8, dtype=torch.int8)
    w1[:, 0], w3[:, 1] = torch.tensor([1, 0, 0, 0], dtype=torch.int8), torch.tensor([1, 0, 0, 0], dtype=torch.int8)
    w1[1, 2], w3[1, 3] = 1, 1
    one = torch.ones(4)
    return moe.Int8Experts(int8_weight(w1, one), int8_weight(w3, one), int8_weight(torch.eye(4, dtype=torch.int8), one))


CLAMPED = [(9, 10), (10, 10), (11, 10), (10, 11), (10, -10), (10, -11), (127, 127), (-11, 9), (-127, -127), (0, 5)]


def test_swiglu_is_clamped_at_its_limits():
    """gate from above only, up on both sides; values at the limit are kept."""
    rows = torch.zeros(len(CLAMPED), 8, dtype=torch.int8)
    for row, (gate, up) in zip(rows, CLAMPED, strict=True):
        row[:2] = torch.tensor([gate, up])
    coded = QuantisedRows(rows, torch.ones(len(rows)))
    shared = moe.shared_expert(coded, _clamped_expert(), LIMIT, torch.float32, torch.bfloat16)
    routed = moe.int8_experts(coded, torch.full((len(rows),), 0.5), (len(rows),), _clamped_expert(), LIMIT)
    want = [_silu(min(gate, 10)) * min(max(up, -10), 10) for gate, up in CLAMPED]
    # The largest number of its row, so its code is 127 and the product gives it back.
    assert torch.allclose(shared[:, 0].double(), torch.tensor(want, dtype=torch.float64), rtol=1e-6, atol=1e-30)
    assert same_bits(routed, shared * 0.5)
    assert bool((shared[:, 1:] == 0).all())


def test_zero_rows_of_experts_are_zero_and_finite():
    rows = quantise_rows(torch.zeros(3, 64))
    expert = moe.Int8Experts(coded_weight(1, 32, 64), coded_weight(2, 32, 64), coded_weight(3, 64, 32))
    weight = torch.tensor([1.0, 0.0, -2.5])
    assert bool((moe.int8_experts(rows, weight, (3,), expert, 1.0) == 0).all())
    assert bool((moe.shared_expert(rows, expert, 1.0, torch.float32, torch.bfloat16) == 0).all())


def test_the_routing_weight_is_in_the_second_scale():
    """Weights of any size leave the codes alone: bits of sums times (scale times weight) times channel scale."""
    expert = moe.Int8Experts(coded_weight(1, 32, 64), coded_weight(2, 32, 64), coded_weight(3, 64, 32))
    rows, weight = quantise_rows(torch.cat((crafted_rows(64, 1e4), noise(4, 9, 64)))), noise(5, 19) * 100
    got = moe.int8_experts(rows, weight, (19,), expert, 1.0)
    hidden = quantise_rows(moe.clamped_swiglu(int8_linear(rows, expert.w1), int8_linear(rows, expert.w3), 1.0))
    sums = expert.w2.products.sums(hidden.codes_TI, (19,)).numpy()
    scale = hidden.scale_T.numpy() * weight.numpy()
    assert same_bits(got, torch.from_numpy(sums * scale[:, None] * expert.w2.scale_XO[0].numpy()))


def test_experts_follow_an_fp64_oracle():
    """Rows of every kind through the whole expert, each error within what one code of the hidden row moves."""
    drawn = [noise(seed, *shape) / 6 for seed, shape in ((1, (32, 64)), (2, (32, 64)), (3, (64, 32)))]
    held = [quantise_weight(weight) for weight in drawn]
    expert = moe.Int8Experts(*(int8_weight(*each) for each in held))
    x = torch.cat((crafted_rows(64, 1e4), noise(4, 20, 64)))
    got = moe.shared_expert(quantise_rows(x), expert, LIMIT, torch.float32, torch.bfloat16).double().numpy()
    codes, scale = code(x)
    w1, w3, w2 = (c.double().numpy() * s.double().numpy()[:, None] for c, s in held)
    gate, up = (np.minimum((codes * scale[:, None]) @ w1.T, LIMIT), (codes * scale[:, None]) @ w3.T)
    hidden = gate / (1 + np.exp(np.minimum(-gate, 700))) * np.clip(up, -LIMIT, LIMIT)
    amplitude = np.maximum(np.abs(hidden).max(axis=1), 1e-4)[:, None]
    exact = np.rint(hidden * 127 / amplitude) * amplitude / 127 @ w2.T
    wrong = np.abs(got - exact) > 1e-6 * amplitude * np.abs(w2).sum(axis=1)
    # A code within rounding of a half may be its neighbour: not in many rows, and by one.
    assert wrong.any(axis=1).sum() <= 1
    assert bool((np.abs(got - exact) <= 2 * amplitude / 127 * np.abs(w2).max()).all())


# Padding, and rows that are not finite.


def _layer(experts=16):
    drawn = {
        "layers.0.ffn.gate.weight": noise(1, experts, 64) / 8,
        "layers.0.ffn.gate.bias": noise(2, experts) / 8,
    }
    for name, lead in (("experts", (experts,)), ("shared_experts", ())):
        for part, shape in (("w1", (32, 64)), ("w3", (32, 64)), ("w2", (64, 32))):
            codes, scale = quantise_weight(noise(len(drawn), *lead, *shape) / 6)
            drawn |= {f"layers.0.ffn.{name}.{part}.weight": codes, f"layers.0.ffn.{name}.{part}.scale": scale}
    return moe.make_moe(drawn, "layers.0.", CONFIG, False, torch.bfloat16)


@pytest.mark.parametrize("filler", [1e4, float("nan"), float("inf"), "row"])
def test_padding_rows_change_no_valid_row(filler):
    """Whatever stands in them, nothing of theirs is sent."""
    layer, valid = _layer(), torch.arange(23) % 5 != 4
    x = noise(7, 23, 64)
    x[~valid] = 0
    group, tokens = Groups.single().ep, torch.zeros(23, dtype=torch.int64)
    clean, sent = layer.forward(x, tokens, valid, group)
    x[~valid] = x[0].clone() if filler == "row" else filler
    again, resent = layer.forward(x, tokens, valid, group)
    assert same_bits(clean[valid], again[valid]) and torch.equal(sent, resent)
    assert int(sent.sum()) == int(valid.sum()) * CONFIG.num_experts_per_tok
    # And rows alone give the bits of rows in company.
    alone, _ = layer.forward(x[valid], tokens[valid], None, group)
    assert same_bits(alone, clean[valid])


def test_a_row_that_is_not_finite_stays_alone():
    x = noise(1, 12, 64)
    weight = coded_weight(2, 32, 64)
    clean = int8_linear(quantise_rows(x), weight)
    x[3, 5], x[8, 0], x[9, 63] = float("nan"), float("inf"), float("-inf")
    rows = quantise_rows(x)
    good = rows.scale_T.isfinite()
    assert good.logical_not().nonzero().flatten().tolist() == [3, 8, 9]
    assert same_bits(int8_linear(rows, weight)[good], clean[good])


# Index keys.


@pytest.mark.parametrize("byte", [0, 127, -128])
def test_bytes_around_the_keys_of_a_paged_cache_do_not_matter(byte):
    """Pages that hold no row of a request are filled with codes whose scales are tiny, huge or NaN."""
    attend = next(fixture for fixture in stages.FIXTURES if fixture.name == "attend-csa")
    given = {"numerics": "w8a8", **SMALL}
    _, plain = passed(attend, Groups.single(), given)

    def other_bytes(caches, value=math.nan):
        for pool in caches.pools.values():
            pool.fill_(value if pool.is_floating_point() else byte)

    with mock.patch.object(stages_scene, "poison", other_bytes):
        assert passed(attend, Groups.single(), given)[1] == plain


def test_keys_and_queries_are_turned_by_the_same_matrix():
    """Turning both changes no score but by rounding; the scores are those of the codes, scale by scale."""
    weights, turned = _index_weights(), angles(torch.arange(5), frequencies(CONFIG, 4), torch.float32)
    latent = quantise_rows(noise(3, 5, CONFIG.q_lora_rank))
    q, head = indexer.index_queries(noise(4, 5, 64).bfloat16(), latent, weights, CONFIG, turned)
    keys = torch.cat((crafted_rows(CONFIG.index_head_dim, 1e4), noise(5, 20, CONFIG.index_head_dim))).bfloat16()
    cached = indexer.quantise_keys(keys)
    got = indexer.index_scores(q[None], head[None], cached[None])[0]
    scale = cached[:, -4:].contiguous().view(torch.float32).flatten().double()
    dots = torch.einsum("tid,ed->tie", q.double(), cached[:, :-4].double()).clamp(min=0)
    want = (dots * head.double()[:, :, None]).sum(1) * scale
    assert torch.allclose(got.double(), want, rtol=2e-6, atol=1e-6 * float(want.abs().max()) + 1e-30)
    plain = _unquantised_scores(latent, weights, turned, head, q, keys)
    error = (want - plain).abs().amax(0) / plain.abs().amax(0).clamp(min=1e-3)
    assert float(error[len(crafted_rows(4)) :].max()) < 0.05


def _unquantised_scores(latent, weights, turned, head, q, keys):
    """Scores of queries and keys that were neither turned nor coded."""
    with mock.patch.object(indexer, "_hadamard", lambda x: x.float()):
        plain_q, plain_head = indexer.index_queries(noise(4, 5, 64).bfloat16(), latent, weights, CONFIG, turned)
    dots = torch.einsum("tid,ed->tie", plain_q.double(), keys.double()).clamp(min=0)
    return (dots * plain_head.double()[:, :, None]).sum(1)


def _index_weights():
    heads = CONFIG.index_n_heads
    compressor = CompressorWeights(torch.zeros(1), torch.zeros(1), torch.zeros(4, 1), torch.ones(32))
    proj = DenseWeight((noise(1, heads, 64) / 8).bfloat16())
    return indexer.IndexerWeights(
        coded_weight(2, heads * CONFIG.index_head_dim, CONFIG.q_lora_rank), proj, compressor, quantised=True
    )


# A row's bits are its own, whatever the number of rows.


def _stage_runs():
    """Name -> (function of some rows, all rows)."""
    rows = torch.cat((crafted_rows(64, 1e4), noise(9, MANY - 10, 64)))
    turned = angles(torch.arange(MANY), frequencies(CONFIG, 4), torch.float32)
    wq_a = DenseWeight((noise(1, 32, 64) / 8).bfloat16())
    attn = ProjectionWeights(wq_a, torch.ones(32), coded_weight(2, 8 * 32, 32), wq_a, torch.ones(32))
    index, layer = _index_weights(), _layer()
    heads = noise(3, MANY, CONFIG.num_attention_heads, CONFIG.head_dim)
    codes, scale = quantise_weight(noise(4, 64, CONFIG.o_groups * CONFIG.o_lora_rank))
    wo_a = (noise(5, CONFIG.o_groups * CONFIG.o_lora_rank, CONFIG.group_columns) / 6).bfloat16()
    weights = output.output_weights(wo_a, codes, scale, CONFIG.o_groups, CONFIG, torch.float32)
    tp, ep = Groups.single().tp, Groups.single().ep

    def attention(part):
        x, angle = rows[part].bfloat16(), tuple(each[part] for each in turned)
        latent = query_latent(x, attn, CONFIG)
        q = queries(latent, attn, CONFIG, angle, torch.bfloat16)
        index_q, head = indexer.index_queries(x, latent, index, CONFIG, angle)
        return torch.cat((q.flatten(1), index_q.flatten(1), head, latent.codes_TI.float()), dim=1)

    def mixture(part):
        x = rows[part]
        return layer.forward(x, torch.zeros(len(x), dtype=torch.int64), None, ep)[0]

    return {
        "attention": attention,
        "index keys": lambda part: indexer.quantise_keys(rows[part, :32]),
        "output": lambda part: output.project_output(heads[part], weights, CONFIG, tp),
        "mixture": mixture,
    }


@pytest.mark.parametrize("name", ["attention", "index keys", "output", "mixture"])
def test_a_rows_bits_do_not_depend_on_the_number_of_rows(name):
    run = _stage_runs()[name]
    whole = run(slice(0, MANY))
    for count in range(1, MANY):
        first = count % (MANY - count)
        part = slice(first, first + count)
        assert same_bits(run(part), whole[part]), (name, count)
