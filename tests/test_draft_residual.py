"""Residual kinds of drafts against transformers' modules and naive formulas, with every gradient."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from draft_toys import toy_config
from torch import nn
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection, DeepseekV4HyperHead
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextGatedResidual

from meshspark.models.drafts.residual import (
    GatedResidual,
    HyperConnection,
    HyperConnectionHead,
    PlainReadout,
    Residual,
    ResidualState,
    build_residual,
    build_residual_readout,
    collapse,
    expand,
)

SAMPLES, ROWS, STREAMS, HIDDEN = 2, 5, 4, 16
MHC = {"kind": "mhc", "streams": STREAMS, "sinkhorn_iters": 20, "eps": 1e-6, "pre_from_prev": False}


@pytest.fixture
def wide_float(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Transformers' modules compute in FP64 where they ask for FP32."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    yield


def randomised(module: Any, seed: int = 1) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = 0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return module.double()


def site_of(**residual: Any) -> HyperConnection:
    site = randomised(build_residual(toy_config(draft_residual=MHC | residual)))
    assert isinstance(site, HyperConnection)
    return site


def rows(*shape: int, seed: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)


def theirs_of(kind: type[nn.Module], ours: HyperConnection | HyperConnectionHead) -> nn.Module:
    config = DeepseekV4Config(hidden_size=HIDDEN, hc_mult=STREAMS, hc_sinkhorn_iters=20, hc_eps=1e-6)
    their = kind(config).double()
    prefix = "hc_" if kind is DeepseekV4HyperHead else ""
    names = {"fn": ours.mix_weight, "base": ours.mix_bias, "scale": ours.mix_scale}
    their.load_state_dict({prefix + name: value.detach() for name, value in names.items()})
    return their


def naive_coefficients(site: HyperConnection, row_nH: torch.Tensor) -> tuple[list, list, list]:
    """pre [n], post [n], mix [n][n] of one row's streams, number by number."""
    n, eps = STREAMS, site.eps
    v = row_nH.flatten()
    v = v / torch.sqrt((v * v).mean() + site.rms_eps)
    m = [(w * v).sum() for w in site.mix_weight]
    s, b = site.mix_scale, site.mix_bias
    pre = [torch.sigmoid(s[0] * m[i] + b[i]) + eps for i in range(n)]
    post = [2 * torch.sigmoid(s[1] * m[n + i] + b[n + i]) for i in range(n)]
    logits = [[s[2] * m[2 * n + n * a + c] + b[2 * n + n * a + c] for c in range(n)] for a in range(n)]
    mix = [[x.exp() / sum(y.exp() for y in line) + eps for x in line] for line in logits]
    for turn in range(site.iterations):
        if turn:
            mix = [[x / (sum(line) + eps) for x in line] for line in mix]
        sums = [sum(line[c] for line in mix) + eps for c in range(n)]
        mix = [[x / sums[c] for c, x in enumerate(line)] for line in mix]
    return pre, post, mix


def naive_site(
    site: HyperConnection, row_nH: torch.Tensor, y_H: torch.Tensor, used: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(input, streams after, pre) of one row; `used` is the pre to read with, the site's own where None."""
    pre, post, mix = naive_coefficients(site, row_nH)
    read = sum((pre[i] if used is None else used[i]) * row_nH[i] for i in range(STREAMS))
    new = [post[j] * y_H + sum(mix[i][j] * row_nH[i] for i in range(STREAMS)) for j in range(STREAMS)]
    return read, torch.stack(new), torch.stack(pre)


def gradients(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Of a sum in which every output has a weight of its own."""
    total = sum((x * torch.linspace(-1, 2, x.numel(), dtype=x.dtype).view(x.shape)).sum() for x in outputs)
    return torch.autograd.grad(total, inputs)


def assert_all_close(got: Any, want: Any) -> None:
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("wide_float")
def test_mhc_is_transformers_hyper_connection() -> None:
    site, streams, y = site_of(), rows(SAMPLES, ROWS, STREAMS, HIDDEN), rows(SAMPLES, ROWS, HIDDEN, seed=3)
    state = ResidualState(streams)
    read, context = site.read(state)
    written = site.write(state, y, context).streams
    post, comb, collapsed = theirs_of(DeepseekV4HyperConnection, site)(streams)
    spread = post.unsqueeze(-1) * y.unsqueeze(-2) + torch.matmul(comb.transpose(-1, -2), streams)
    assert_all_close((read, context.post, context.mix, written), (collapsed, post, comb, spread))


def test_mhc_in_fp32_is_transformers_hyper_connection() -> None:
    site, streams = site_of().float(), rows(SAMPLES, ROWS, STREAMS, HIDDEN).float()
    post, comb, collapsed = theirs_of(DeepseekV4HyperConnection, site).float()(streams)
    read, context = site.read(ResidualState(streams))
    for got, want in ((read, collapsed), (context.post, post), (context.mix, comb)):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("wide_float")
def test_head_is_transformers_hyper_head() -> None:
    head = randomised(build_residual_readout(toy_config(draft_residual=MHC)))
    streams = rows(SAMPLES, ROWS, STREAMS, HIDDEN)
    torch.testing.assert_close(head(ResidualState(streams)), theirs_of(DeepseekV4HyperHead, head)(streams))


@pytest.mark.parametrize("pre_from_prev", [False, True])
def test_mhc_and_its_gradients_are_the_naive_formulas(pre_from_prev: bool) -> None:
    """Read, write and the pre that is handed on; gradients of streams, output, carried pre and every parameter."""
    site = site_of(pre_from_prev=pre_from_prev)
    streams, y = rows(1, 3, STREAMS, HIDDEN), rows(1, 3, HIDDEN, seed=3)
    carried = rows(1, 3, STREAMS, seed=4)
    inputs = [streams, y, *site.parameters()] + ([carried] if pre_from_prev else [])
    state = ResidualState(streams, carried if pre_from_prev else None)
    read, context = site.read(state)
    after = site.write(state, y, context)
    assert context.pre is not None
    assert (after.pre is not None) == pre_from_prev
    if pre_from_prev:
        assert after.pre is context.pre
    naive = [naive_site(site, streams[0, q], y[0, q], carried[0, q] if pre_from_prev else None) for q in range(3)]
    want = [torch.stack(part)[None] for part in zip(*naive, strict=True)]
    got = [read, after.streams, context.pre]
    assert_all_close(got, want)
    assert_all_close(gradients(got, inputs), gradients(want, inputs))


def test_head_and_its_gradients_are_the_naive_formula() -> None:
    head = randomised(build_residual_readout(toy_config(draft_residual=MHC)))
    streams = rows(1, 3, STREAMS, HIDDEN)
    got = head(ResidualState(streams))
    lines = []
    for row in streams[0]:
        v = row.flatten() / torch.sqrt((row * row).mean() + head.rms_eps)
        weights = [
            torch.sigmoid(head.mix_scale[0] * (w * v).sum() + b) + head.eps
            for w, b in zip(head.mix_weight, head.mix_bias, strict=True)
        ]
        lines.append(sum(weight * stream for weight, stream in zip(weights, row, strict=True)))
    want = torch.stack(lines)[None]
    inputs = [streams, *head.parameters()]
    assert_all_close([got], [want])
    assert_all_close(gradients([got], inputs), gradients([want], inputs))


def test_write_sums_over_the_first_axis_of_an_asymmetric_mix() -> None:
    """Stream 0 goes to stream 1 alone, by a mix that is doubly stochastic and not its own transpose."""
    site, streams = site_of(), torch.zeros(1, 1, STREAMS, HIDDEN, dtype=torch.float64)
    streams[0, 0, 0] = 1
    cycle = torch.roll(torch.eye(STREAMS, dtype=torch.float64), 1, dims=1)
    with torch.no_grad():
        site.mix_weight.zero_()
        site.mix_bias[2 * STREAMS :] = 40 * cycle.flatten()
    state = ResidualState(streams)
    _, context = site.read(state)
    new = site.write(state, torch.zeros(1, 1, HIDDEN, dtype=torch.float64), context).streams
    assert new[0, 0].mean(1).round(decimals=4).tolist() == [0, 1, 0, 0]


def test_columns_of_the_mix_sum_to_one() -> None:
    _, context = site_of().read(ResidualState(rows(SAMPLES, ROWS, STREAMS, HIDDEN)))
    assert context.mix is not None
    torch.testing.assert_close(context.mix.sum(-2), torch.ones(SAMPLES, ROWS, STREAMS).double(), rtol=0, atol=1e-5)
    assert (context.mix - context.mix.mT).abs().max() > 0.1


def test_first_site_reads_stream_zero_and_the_readout_the_last_pre() -> None:
    config = toy_config(draft_residual=MHC | {"pre_from_prev": True})
    x = rows(1, 3, HIDDEN)
    state = expand(x, config)
    assert state.streams.shape == (1, 3, STREAMS, HIDDEN) and state.pre is not None
    assert state.pre[0, 0].tolist() == [1, 0, 0, 0]
    site = site_of(pre_from_prev=True)
    read, context = site.read(state)
    assert torch.equal(read, x)
    after = site.write(state, 2 * x, context)
    readout = build_residual_readout(config)
    assert isinstance(readout, PlainReadout) and not list(readout.parameters())
    want = torch.einsum("bqn,bqnh->bqh", context.pre, after.streams)
    torch.testing.assert_close(readout(after), want)
    assert not [name for name, _ in site.named_buffers()], "the carried pre is a value, not state of a module"


@pytest.mark.parametrize("pre_from_prev", [False, True])
def test_mhc_stays_fp32_under_autocast_and_casts(pre_from_prev: bool) -> None:
    """Under BF16 autocast coefficients have the bits of FP32; `.to(bfloat16)` leaves parameters unrounded."""
    config = toy_config(draft_residual=MHC | {"pre_from_prev": pre_from_prev})
    site, head = site_of(pre_from_prev=pre_from_prev).float(), randomised(HyperConnectionHead(config)).float()
    streams = rows(1, 4, STREAMS, HIDDEN).float()
    y = rows(1, 4, HIDDEN, seed=3).float()
    carried = rows(1, 4, STREAMS, seed=4).float() if pre_from_prev else None
    state = ResidualState(streams, carried)

    def all_of() -> tuple[torch.Tensor, ...]:
        read, context = site.read(state)
        after = site.write(state, y, context)
        assert context.post is not None and context.mix is not None and context.pre is not None
        return read, context.post, context.mix, context.pre, after.streams, head(state)

    plain = all_of()
    with torch.autocast("cpu", torch.bfloat16):
        auto = all_of()
    assert all(torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(auto, plain, strict=True))
    before = [p.detach().clone() for p in [*site.parameters(), *head.parameters()]]
    nn.ModuleList((site, head)).to(torch.bfloat16)
    after = [*site.parameters(), *head.parameters()]
    assert all(torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(after, before, strict=True))


def test_narrow_streams_are_mixed_in_fp32_and_rounded_once() -> None:
    site, streams = site_of().float(), rows(1, 4, STREAMS, HIDDEN).bfloat16()
    y = rows(1, 4, HIDDEN, seed=3).bfloat16()
    state = ResidualState(streams)
    read, context = site.read(state)
    assert context.mix is not None and context.mix.dtype == torch.float32
    got = site.write(state, y, context).streams
    wide = ResidualState(streams.float())
    wide_read, wide_context = site.read(wide)
    assert torch.equal(read, wide_read.bfloat16())
    assert torch.equal(got, site.write(wide, y.float(), wide_context).streams.bfloat16())


def gated_of(use_combine: bool) -> tuple[Any, Any]:
    config = toy_config(draft_residual={"kind": "gr", "streams": STREAMS, "rank": 6})
    ours = randomised(build_residual(config) if use_combine else build_residual_readout(config))
    their_config = Qwen4ExpTextConfig(hidden_size=HIDDEN, hc_count=STREAMS, hc_lowrank=6, rms_norm_eps=1e-6)
    theirs = Qwen4ExpTextGatedResidual(their_config, use_combine).double()
    names = {
        "hc_norm.weight": ours.norm_weight,
        "input_mix_weight_down.weight": ours.down.weight,
        "input_mix_weight_up.weight": ours.up.weight,
    }
    if use_combine:
        names["block_inject_weight.weight"] = ours.inject.weight
    theirs.load_state_dict({name: value.detach() for name, value in names.items()})
    return ours, theirs


@pytest.mark.usefixtures("wide_float")
def test_gr_is_transformers_gated_residual() -> None:
    streams, y = rows(SAMPLES, ROWS, STREAMS, HIDDEN), rows(SAMPLES, ROWS, HIDDEN, seed=3)
    ours, theirs = gated_of(True)
    state = ResidualState(streams)
    read, context = ours.read(state)
    mixed, hyper, inject = theirs(streams.flatten(-2))
    torch.testing.assert_close(read, mixed)
    want = hyper + (y.unsqueeze(-2) * inject.unsqueeze(-1)).flatten(-2)
    torch.testing.assert_close(ours.write(state, y, context).streams.flatten(-2), want)
    readout, their_readout = gated_of(False)
    torch.testing.assert_close(readout(state), their_readout(streams.flatten(-2)))


def test_gr_and_its_gradients_are_the_naive_formulas() -> None:
    site, _ = gated_of(True)
    streams, y = rows(1, 3, STREAMS, HIDDEN), rows(1, 3, HIDDEN, seed=3)
    state = ResidualState(streams)
    read, context = site.read(state)
    got = [read, site.write(state, y, context).streams]
    reads, writes = [], []
    for row, out in zip(streams[0], y[0], strict=True):
        gain = 1 + site.norm_weight.view(STREAMS, HIDDEN)
        branches = [gain[i] * row[i] / torch.sqrt((row[i] ** 2).mean() + site.eps) for i in range(STREAMS)]
        xn = torch.cat(branches)
        gate = torch.sigmoid(site.up.weight @ F.silu(site.down.weight @ xn / STREAMS)).view(STREAMS, HIDDEN)
        reads.append(sum(gate[i] * branches[i] for i in range(STREAMS)) / STREAMS)
        inject = 2 * torch.sigmoid(site.inject.weight @ xn / STREAMS)
        writes.append(torch.stack([row[i] + inject[i] * out for i in range(STREAMS)]))
    want = [torch.stack(reads)[None], torch.stack(writes)[None]]
    inputs = [streams, y, *site.parameters()]
    assert_all_close(got, want)
    assert_all_close(gradients(got, inputs), gradients(want, inputs))


def test_standard_is_an_addition_without_parameters() -> None:
    config = toy_config()
    site, x, y = build_residual(config), rows(1, 3, HIDDEN), rows(1, 3, HIDDEN, seed=3)
    assert type(site) is Residual and not list(site.parameters())
    state = expand(x, config)
    read, context = site.read(state)
    assert read is x
    assert torch.equal(site.write(state, y, context).streams, x + y)
    assert build_residual_readout(config)(state) is x


def test_fresh_parameters() -> None:
    for residual in (MHC, {"kind": "gr", "streams": STREAMS, "rank": 6}):
        config = toy_config(draft_residual=residual)
        for module in (build_residual(config), build_residual_readout(config)):
            for parameter in module.parameters():
                nn.init.constant_(parameter, 7.0)
            module.reset_parameters(0.02)
            assert not any((p == 7).any() for p in module.parameters())
            assert not isinstance(module, GatedResidual) or not module.norm_weight.any()
    state = expand(rows(1, 1, HIDDEN), toy_config(draft_residual=MHC))
    pre = torch.full((1, 1, STREAMS), 0.25, dtype=torch.float64)
    torch.testing.assert_close(collapse(pre, state.streams), state.streams[:, :, 0])
