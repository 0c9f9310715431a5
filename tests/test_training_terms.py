"""Terms of rows of logits against autograd of the plain formulas, whole and over shards of the vocabulary."""

import pytest
import torch
from rank_pool import RankPools, from_bytes, to_bytes
from torch import Tensor
from torch.autograd import gradcheck

from meshspark.models.training.terms import VocabularyShard, copy_to_shards, shard_rows, vocabulary_terms
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

ROWS, WIDTH, VOCABULARY, RANK = 9, 5, 16, 3


def given(dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(11)
    hidden, teacher = torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    head = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64)
    table = torch.randn(VOCABULARY, RANK, generator=generator, dtype=torch.float64)
    latent = torch.randn(ROWS, RANK, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, VOCABULARY, (ROWS,), generator=generator)
    labels[:2] = torch.tensor([0, VOCABULARY - 1])
    weights = torch.rand(ROWS, generator=generator, dtype=torch.float64)
    return hidden.to(dtype), teacher.to(dtype), head.to(dtype), table.to(dtype), latent.to(dtype), labels, weights


def plain(logits: Tensor, labels: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    p, q = logits.softmax(-1), teacher.softmax(-1)
    return -logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0], (p - q).abs().sum(-1)


@pytest.mark.parametrize("with_teacher", [False, True])
def test_values_and_gradients_equal_autograd(with_teacher: bool) -> None:
    hidden, states, head, _, _, labels, weights = given()
    logits, teacher = (hidden @ head.T).view(3, 3, -1), (states @ head.T).view(3, 3, -1)
    labels, weights = labels.view(3, 3), weights.view(3, 3)
    leaves = [logits.clone().requires_grad_() for _ in range(2)]
    terms = vocabulary_terms(leaves[0], labels, teacher if with_teacher else None)
    ce, l1 = plain(leaves[1], labels, teacher)
    torch.testing.assert_close(terms.ce_R, ce, rtol=0, atol=1e-13)
    total, want = (terms.ce_R * weights).sum(), (ce * weights).sum()
    assert torch.equal(terms.draft_id_R, logits.argmax(-1))
    torch.testing.assert_close(terms.draft_top1_R, logits.softmax(-1).amax(-1), rtol=0, atol=1e-14)
    if with_teacher:
        assert terms.l1_R is not None and terms.teacher_id_R is not None and terms.teacher_top1_R is not None
        torch.testing.assert_close(terms.l1_R, l1, rtol=0, atol=1e-13)
        assert torch.equal(terms.teacher_id_R, teacher.argmax(-1))
        torch.testing.assert_close(terms.teacher_top1_R, teacher.softmax(-1).amax(-1), rtol=0, atol=1e-14)
        total, want = total + (terms.l1_R * weights.flip(0)).sum(), want + (l1 * weights.flip(0)).sum()
    else:
        assert terms.l1_R is None and terms.teacher_id_R is None
    total.backward()
    want.backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad, rtol=0, atol=1e-13)
    assert not terms.draft_top1_R.requires_grad and not terms.draft_id_R.requires_grad


def test_gradients_are_slopes() -> None:
    hidden, states, head, _, _, labels, _ = given()
    logits = (hidden @ head.T).requires_grad_()
    assert gradcheck(lambda x: vocabulary_terms(x, labels, states @ head.T).ce_R, (logits,))
    assert gradcheck(lambda x: vocabulary_terms(x, labels, states @ head.T).l1_R, (logits,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_logits_are_widened(dtype: torch.dtype) -> None:
    hidden, states, head, _, _, labels, weights = given()
    logits, teacher = (hidden @ head.T).to(dtype), (states @ head.T).to(dtype)
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    terms = vocabulary_terms(leaf, labels, teacher)
    ce, l1 = plain(exact, labels, teacher.double())
    assert terms.ce_R.dtype == torch.float32 and terms.l1_R is not None
    torch.testing.assert_close(terms.ce_R.double(), ce, rtol=0, atol=5e-6)
    torch.testing.assert_close(terms.l1_R.double(), l1, rtol=0, atol=1e-6)
    ((terms.ce_R + terms.l1_R) * weights.float()).sum().backward()
    ((ce + l1) * weights).sum().backward()
    assert leaf.grad is not None and leaf.grad.dtype == dtype and exact.grad is not None
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=0, atol=1e-6 if dtype == torch.float32 else 4e-3)


def test_large_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-3e38, 0.0, 3e38]], requires_grad=True)
    terms = vocabulary_terms(logits, torch.tensor([0, 2]), -logits.detach())
    assert terms.l1_R is not None and torch.equal(terms.ce_R, torch.zeros(2))
    torch.testing.assert_close(terms.l1_R, torch.full((2,), 2.0))
    (terms.ce_R + terms.l1_R).sum().backward()
    assert logits.grad is not None and bool(logits.grad.isfinite().all())


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"labels are \[2\]"):
        vocabulary_terms(torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"teacher \[3, 5\]"):
        vocabulary_terms(torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64), torch.zeros(3, 5))
    with pytest.raises(ValueError, match="ids 3 to 6 of a vocabulary of 5"):
        shard_rows(torch.zeros(5, 2), 4, VocabularyShard(3))


def weighted(terms: object, weights: Tensor) -> Tensor:
    return (terms.ce_R * weights).sum() + 0.5 * (terms.l1_R * weights.flip(0)).sum()  # type: ignore[attr-defined]


def over_shards(groups: Groups, cuts: list[int], ties: bool = False) -> dict:
    """This rank's part of the loss over shards; its gradients, those of a replicated table as they are given."""
    group = groups.world
    hidden, states, head, table, latent, labels, weights = given()
    if ties:
        head, table = torch.zeros_like(head), torch.zeros_like(table)
    start, stop = cuts[group.rank], cuts[group.rank + 1]
    shard = VocabularyShard(start, group)
    leaves = [x.clone().requires_grad_() for x in (hidden, latent, table)]
    own = head[start:stop]
    for _ in range(2):
        for leaf in leaves:
            leaf.grad = None
        rows = shard_rows(leaves[2], stop - start, shard)
        logits = copy_to_shards(leaves[0], shard) @ own.T + copy_to_shards(leaves[1], shard) @ rows.T
        terms = vocabulary_terms(logits, labels, states @ own.T, shard)
        weighted(terms, weights).backward()
    values = (terms.ce_R, terms.l1_R, terms.draft_top1_R, terms.teacher_top1_R, terms.draft_id_R, terms.teacher_id_R)
    return {"values": [to_bytes(v) for v in values], "gradients": [to_bytes(leaf.grad) for leaf in leaves]}


@pytest.mark.parametrize("cuts", [[0, 5, 16], [0, 4, 8, 12, 16], [0, 1, 2, 3, 16]])
def test_shards_equal_the_whole(ranks: RankPools, cuts: list[int]) -> None:
    world = len(cuts) - 1
    results = ranks.run(Topology(world, 1, world), "test_training_terms:over_shards", timeout=100, cuts=cuts)
    hidden, states, head, table, latent, labels, weights = given()
    leaves = [x.clone().requires_grad_() for x in (hidden, latent, table)]
    logits = leaves[0] @ head.T + leaves[1] @ leaves[2].T
    terms = vocabulary_terms(logits, labels, states @ head.T)
    weighted(terms, weights).backward()
    whole = (terms.ce_R, terms.l1_R, terms.draft_top1_R, terms.teacher_top1_R, terms.draft_id_R, terms.teacher_id_R)
    for result in results:
        for packed, value in zip(result["values"], whole, strict=True):
            torch.testing.assert_close(from_bytes(packed), value, rtol=0, atol=1e-12)
        assert result["values"] == results[0]["values"]
        for packed, leaf in zip(result["gradients"][:2], leaves, strict=False):
            torch.testing.assert_close(from_bytes(packed), leaf.grad, rtol=0, atol=1e-12)
    mean = sum(from_bytes(result["gradients"][2]) for result in results) / world
    torch.testing.assert_close(mean, leaves[2].grad, rtol=0, atol=1e-12)


def test_of_equal_logits_the_lowest_id_counts_on_every_rank(ranks: RankPools) -> None:
    results = ranks.run(Topology(2, 1, 2), "test_training_terms:over_shards", timeout=100, cuts=[0, 5, 16], ties=True)
    for result in results:
        assert not from_bytes(result["values"][4]).any() and not from_bytes(result["values"][5]).any()
