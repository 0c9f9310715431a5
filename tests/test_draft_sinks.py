"""Sinks of a draft's attention: as a column, and by the log-sum-exp."""

import pytest
import torch
from draft_attention_scene import attention, blocks, config, edge_blocks, on, run, without_compiler

from meshspark.models.drafts.backends import eager
from meshspark.models.drafts.flex import with_sinks
from meshspark.models.drafts.plans import DensePlan


def column_reference(q, k, v, mask, sinks):
    scores = (q @ k.mT).masked_fill(~mask, float("-inf"))
    column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.softmax(torch.cat((scores, column), dim=3), dim=3)[..., :-1] @ v


def tensors(blind_row: bool):
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 3, rows, 4, generator=generator, dtype=torch.float64) for rows in (5, 6, 6))
    mask = torch.rand(2, 1, 5, 6, generator=generator) < 0.6
    mask[:, :, 0] = True
    mask[:, :, 3] = not blind_row
    sinks = torch.tensor([-2.0, 0.5, 3.0], dtype=torch.float64)
    return [x.requires_grad_() for x in (q, k, v, sinks)], mask


@pytest.mark.parametrize("blind_row", [False, True])
def test_eager_and_the_log_sum_exp_are_the_column_with_every_gradient(blind_row):
    inputs, mask = tensors(blind_row)
    q, k, v, sinks = inputs
    expected = column_reference(q, k, v, mask, sinks)
    column = eager(q, k, v, DensePlan(mask, ~mask.any(dim=3, keepdim=True)), sinks, 1.0)
    scores = (q @ k.mT).masked_fill(~mask, float("-inf"))
    weights = torch.softmax(scores.masked_fill(~mask.any(dim=3, keepdim=True), 0), dim=3).masked_fill(~mask, 0)
    split = with_sinks(weights @ v, torch.logsumexp(scores, dim=3), sinks)
    probe = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view(expected.shape)
    wanted = torch.autograd.grad((expected * probe).sum(), inputs)
    for found in (column, split):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
        for gradient, want in zip(torch.autograd.grad((found * probe).sum(), inputs), wanted, strict=True):
            torch.testing.assert_close(gradient, want, rtol=1e-11, atol=1e-13)
    assert (column[:, :, 3] == 0).all() == blind_row


@pytest.mark.parametrize("sink", [-80.0, 0.0, 5.0, 80.0])
@pytest.mark.parametrize("mode", ["gqa", "deepseek_v4"])
def test_flex_has_sinks_and_a_blind_row_stays_zero(mode, sink, monkeypatch):
    without_compiler(monkeypatch)
    extra = {"attention_sinks": True} if mode == "gqa" else {}
    plain = attention(config(mode, attention_backend="eager", **extra)).requires_grad_(False)
    plain.sinks.add_(sink)
    given = edge_blocks()
    expected, found = run(plain, given), run(on(plain, "flex").requires_grad_(False), given)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    assert (found.unflatten(1, (-1, 3))[~given.keep] == 0).all()


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_sinks_alone_learn_hidden_values(backend):
    teacher = attention(config("deepseek_v4", attention_backend=backend)).requires_grad_(False)
    student = on(teacher, backend).requires_grad_(False)
    student.sinks.zero_()
    student.sinks.requires_grad_()
    given = blocks([[2, 5, 8], [9, 4, 1]], [[1, 1, 1], [1, 1, 1]], rows=9)
    wanted = run(teacher, given)
    optimizer = torch.optim.LBFGS([student.sinks], max_iter=200, line_search_fn="strong_wolfe", tolerance_change=1e-15)

    def loss():
        optimizer.zero_grad()
        value = (run(student, given) - wanted).square().sum()
        value.backward()
        return value

    assert (student.sinks - teacher.sinks).abs().max() > 0.3
    optimizer.step(loss)
    torch.testing.assert_close(student.sinks.detach(), teacher.sinks, rtol=0, atol=1e-4)
