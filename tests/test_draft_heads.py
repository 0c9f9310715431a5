"""Heads of drafts: each Markov kind and each form of the confidence input against its formula, row by row."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from draft_toys import toy_config

from meshspark.models.drafts.heads import ConfidenceHead, MarkovHead, build_confidence_head, build_markov_head

BLOCKS, ROWS, HIDDEN, RANK, VOCAB = 2, 3, 16, 4, 40


def randomised(head: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    for parameter in head.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return head


def markov_of(kind: str) -> MarkovHead:
    head = build_markov_head(toy_config({"markov_head_type": kind}))
    assert head is not None
    return randomised(head)


def confidence_of(**dflash: Any) -> ConfidenceHead:
    head = build_confidence_head(toy_config({"enable_confidence_head": True} | dflash))
    assert head is not None
    return randomised(head)


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """previous [1, N, b], hidden and readout [1, N, b, H]."""
    generator = torch.Generator().manual_seed(2)
    previous = torch.randint(VOCAB, (1, BLOCKS, ROWS), generator=generator)
    hidden = torch.randn(1, BLOCKS, ROWS, HIDDEN, generator=generator, dtype=torch.float64, requires_grad=True)
    readout = torch.randn(1, BLOCKS, ROWS, HIDDEN, generator=generator, dtype=torch.float64, requires_grad=True)
    return previous, hidden, readout


def naive_terms(head: Any, kind: str, previous: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """[b, V] of one block by the formulas of training.md 6."""
    w1, w2 = head.markov_w1.weight, head.markov_w2.weight
    state, terms = torch.zeros(RANK, dtype=torch.float64), []
    for token, h in zip(previous.tolist(), hidden, strict=True):
        row = w1[token]
        if kind == "vanilla":
            terms.append(w2 @ row)
        elif kind == "gated":
            terms.append(w2 @ (torch.sigmoid(head.gate.weight @ torch.cat((h, row))) * row))
        else:
            gate, candidate, output = (head.joint.weight @ torch.cat((state, row, h))).split(RANK)
            state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
            terms.append(w2 @ torch.tanh(output))
    return torch.stack(terms)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_markov_kinds_and_their_gradients(kind: str) -> None:
    head = markov_of(kind)
    previous, hidden, _ = inputs()
    got = head(previous, hidden)
    want = torch.stack([naive_terms(head, kind, previous[0, n], hidden[0, n]) for n in range(BLOCKS)])[None]
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    factor = torch.linspace(-1, 1, got.numel(), dtype=torch.float64).view(got.shape)
    of = [*head.parameters()] + ([] if kind == "vanilla" else [hidden])
    mine = torch.autograd.grad((got * factor).sum(), of)
    for one, other in zip(mine, torch.autograd.grad((want * factor).sum(), of), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_steps_give_what_the_block_gives(kind: str) -> None:
    head = markov_of(kind)
    previous, hidden, _ = inputs()
    whole, state = head.latent(previous, hidden), None
    for row in range(ROWS):
        latent, state = head.step(previous[..., row], hidden[..., row, :], state)
        torch.testing.assert_close(latent, whole[..., row, :])
    assert (state is None) == (kind != "rnn")
    torch.testing.assert_close(F.linear(whole, head.markov_w2.weight), head(previous, hidden))


def test_rank_zero_has_no_markov_head() -> None:
    assert build_markov_head(toy_config({"markov_rank": 0})) is None
    assert build_confidence_head(toy_config()) is None


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_fresh_markov_head_adds_nothing(kind: str) -> None:
    head = markov_of(kind)
    head.reset_parameters(0.02)
    previous, hidden, _ = inputs()
    assert not head.double()(previous, hidden).any()
    assert head.markov_w1.weight.any()


@pytest.mark.parametrize("source", ["pre_norm", "post_norm"])
@pytest.mark.parametrize("markov", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_confidence_takes_the_row_that_the_config_names(source: str, markov: bool, bias: bool) -> None:
    head = confidence_of(confidence_head_input=source, confidence_head_with_markov=markov, confidence_head_bias=bias)
    previous, hidden, readout = inputs()
    rows = markov_of("vanilla").embedding(previous)
    assert head.proj.weight.shape == (1, HIDDEN + (RANK if markov else 0))
    assert (head.proj.bias is not None) == bias
    taken = readout if source == "pre_norm" else hidden
    want = (torch.cat((taken, rows), -1) if markov else taken) @ head.proj.weight[0]
    got = head(hidden, readout, rows)
    torch.testing.assert_close(got, want + head.proj.bias if bias else want)
    other = torch.autograd.grad(got.sum(), [hidden, readout], allow_unused=True)
    assert (other[0] is None) == (source == "pre_norm") and (other[1] is None) == (source == "post_norm")


def test_confidence_without_its_markov_rows_is_refused() -> None:
    head = confidence_of(confidence_head_with_markov=True)
    _, hidden, readout = inputs()
    with pytest.raises(ValueError, match="markov_br is None"):
        head(hidden, readout)


def test_confidence_is_projected_in_fp32() -> None:
    """Under autocast the bits of FP32; with BF16 weights those of the widened weights."""
    head = confidence_of(confidence_head_with_markov=True).float()
    previous, hidden, readout = inputs()
    rows = markov_of("vanilla").float().embedding(previous)
    plain = head(hidden.float(), readout.float(), rows)
    with torch.autocast("cpu", torch.bfloat16):
        auto = head(hidden.float(), readout.float(), rows)
    assert auto.dtype == torch.float32 and torch.equal(auto, plain)
    narrow = head.bfloat16()
    got = narrow(hidden.bfloat16(), readout.bfloat16(), rows.bfloat16())
    taken = torch.cat((hidden.bfloat16().float(), rows.bfloat16().float()), -1)
    assert narrow.proj.bias is not None
    want = F.linear(taken, narrow.proj.weight.float(), narrow.proj.bias.float()).squeeze(-1)
    assert got.dtype == torch.float32 and torch.equal(got, want)
