"""The objective against a plain loop over blocks and offsets in FP64; metrics; what is refused."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from training_scene import (
    BLOCK,
    CONFIG,
    FEATURES,
    HIDDEN,
    MASK_ID,
    WINDOW,
    SmallDraft,
    gradients,
    objective,
    packed,
    sample,
    tables,
)

from meshspark.models.training.anchors import candidates, draw_anchors, sample_generator
from meshspark.models.training.config import ObjectiveConfig
from meshspark.models.training.metrics import add_pairs, divided
from meshspark.models.training.objective import Objective
from meshspark.models.training.prepare import draft_batch
from meshspark.models.training.samples import FeatureShape, collate


def plain_rows(draft: SmallDraft, one: dict, config: ObjectiveConfig, generator: torch.Generator) -> list[list[dict]]:
    """By block, then offset: the terms of what is learned, one row of logits at a time, from the whole sample."""
    ids, mask = one["input_ids"][0], one["loss_mask"].bool()
    documents = one.get("document_ids", torch.zeros(1, len(ids), dtype=torch.int64))
    anchors = draw_anchors(mask, documents, [generator], config.num_anchors, config.anchor_rule)
    target, blocks = tables(), []
    for anchor in anchors.positions_BN[0][anchors.keep_BN[0]].tolist():
        start = min(p for p in range(len(ids)) if documents[0, p] == documents[0, anchor])
        context = one["hidden_states"][:, start:anchor]
        noise = target.embedding_VH[torch.tensor([[int(ids[anchor])] + [MASK_ID] * (config.block_size - 1)])]
        place = torch.tensor([[anchor - start]])
        out = draft(noise, context if anchor > start else one["hidden_states"][:, :1], place, torch.ones(1, 1).bool())
        rows: list[dict] = []
        for j in range(config.block_size):
            at = anchor + 1 + j
            if at >= len(ids) or not mask[0, at] or documents[0, at] != documents[0, anchor]:
                break
            previous = ids[anchor + j]
            row = draft.markov_head.markov_w1.weight[previous]
            logits = target.head_VH @ out.hidden_BQH[0, j] + draft.markov_head.markov_w2.weight @ row
            taught = target.head_VH @ one["target_last_hidden_states"][0, anchor + j]
            p, q = logits.softmax(0), taught.softmax(0)
            l1 = (p - q).abs().sum()
            accepted = float((1 - l1.detach() / 2).clamp(0, 1))
            sure = draft.confidence_head.proj.weight[0] @ torch.cat([out.readout_BQH[0, j], row])
            c = torch.sigmoid(sure)
            rows.append(
                {
                    "j": j,
                    "weight": math.exp(-j / config.loss_decay_gamma) if config.loss_decay_gamma else 1.0,
                    "ce": -torch.log(p[ids[at]]),
                    "l1": l1,
                    "bce": -(accepted * torch.log(c) + (1 - accepted) * torch.log(1 - c)),
                    "accepted": accepted,
                    "sure": float(c.detach()),
                    "correct": int(p.argmax()) == int(ids[at]),
                    "agreed": int(p.argmax()) == int(q.argmax()),
                    "p_top": float(p.max().detach()),
                    "q_top": float(q.max()),
                }
            )
        blocks.append(rows)
    return blocks


def plain_total(blocks: list[list[dict]], config: ObjectiveConfig) -> tuple[Tensor, float]:
    total = torch.zeros((), dtype=torch.float64)
    for row in (row for rows in blocks for row in rows):
        parts = (
            config.ce_loss_alpha * row["ce"]
            + config.l1_loss_alpha * row["l1"]
            + config.confidence_head_alpha * row["bce"]
        )
        total = total + row["weight"] * parts
    return total, sum(row["weight"] for rows in blocks for row in rows)


SAMPLES = [
    sample(0, 19),
    sample(1, 2, supervised=1.0),
    sample(2, 3, supervised=1.0),
    sample(3, 12, (5, 1, 6), supervised=0.9),
    sample(4, 30, supervised=0.5),
]
CASES = {
    "default": CONFIG,
    "no decay": replace(CONFIG, loss_decay_gamma=None),
    "first target": replace(CONFIG, anchor_rule="first_target"),
    "all anchors": replace(CONFIG, num_anchors=512, chunk_blocks=0),
    "one at a time": replace(CONFIG, num_anchors=4, chunk_blocks=1),
    "cross entropy": replace(CONFIG, l1_loss_alpha=0.0, confidence_head_alpha=0.0, ce_loss_alpha=1.0),
    "confidence": replace(CONFIG, ce_loss_alpha=0.0, l1_loss_alpha=0.0),
}


@pytest.mark.parametrize("case", list(CASES))
def test_objective_equals_a_plain_loop(case: str) -> None:
    config = CASES[case]
    draft, oracle = SmallDraft(), SmallDraft()
    out = objective(draft, config)(packed(SAMPLES, config))
    blocks = [
        rows for n, one in enumerate(SAMPLES) for rows in plain_rows(oracle, one, config, sample_generator(1, 0, n))
    ]
    total, weight = plain_total(blocks, config)
    assert out.loss_terms is not None
    assert float(out.loss_terms[0].detach()) == pytest.approx(float(total.detach()), rel=1e-13)
    assert float(out.loss_terms[1]) == pytest.approx(weight, rel=1e-13)
    assert float(out.loss.detach()) == pytest.approx(float(total.detach()) / weight, rel=1e-13)
    out.loss_terms[0].backward()
    total.backward()
    for name, gradient in gradients(oracle).items():
        torch.testing.assert_close(gradients(draft)[name], gradient, rtol=0, atol=1e-12)
    check_metrics(divided(out.metrics), [rows for rows in blocks if rows], config)


def check_metrics(metrics: dict[str, float], blocks: list[list[dict]], config: ObjectiveConfig) -> None:
    rows = [row for block in blocks for row in block]
    weight = sum(row["weight"] for row in rows)

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    def products(name: str, block: list[dict]) -> list[float]:
        values, product = [], 1.0
        for row in block:
            product *= row[name]
            values.append(product)
        return values

    want = {
        "ce_loss": sum(row["weight"] * float(row["ce"].detach()) for row in rows) / weight,
        "l1_loss": sum(row["weight"] * float(row["l1"].detach()) for row in rows) / weight,
        "acc": mean([row["correct"] for row in rows]),
        "teacher_agreement": mean([row["agreed"] for row in rows]),
        "draft_top1_prob": mean([row["p_top"] for row in rows]),
        "teacher_top1_prob": mean([row["q_top"] for row in rows]),
        "tau_probabilistic": mean([1 + sum(products("accepted", block)) for block in blocks]),
        "tau_greedy": mean([1 + sum(products("correct", block)) for block in blocks]),
        "full_blocks": mean([len(block) == BLOCK for block in blocks]),
    }
    for j in range(BLOCK):
        at = [row for row in rows if row["j"] == j]
        want[f"ce_position_{j}"] = mean([float(row["ce"].detach()) for row in at])
        want[f"accuracy_position_{j}"] = mean([row["correct"] for row in at])
        want[f"accept_rate_{j}"] = mean([row["accepted"] for row in at])
    if config.confidence_head_alpha > 0:
        want["confidence_loss"] = sum(row["weight"] * float(row["bce"].detach()) for row in rows) / weight
        want["confidence_abs_error"] = mean([abs(row["sure"] - row["accepted"]) for row in rows])
        want["confidence_bias"] = mean([row["sure"] - row["accepted"] for row in rows])
        sure = [p for block in blocks for p in products("sure", block)]
        want["confidence_cumprod_bias"] = mean(sure) - mean([p for b in blocks for p in products("accepted", b)])
    anchors = {"anchors", "anchor_candidates", "anchors_learned"}
    assert set(metrics) == set(want) | anchors
    for name, value in want.items():
        assert metrics[name] == pytest.approx(value, rel=1e-12, abs=1e-13), name


def test_anchor_metrics() -> None:
    made = packed(SAMPLES, replace(CONFIG, num_anchors=3))
    metrics = divided(objective(SmallDraft())(made).metrics)
    counts = [int(candidates(s["loss_mask"], s.get("document_ids"))[0].sum()) for s in SAMPLES]
    assert metrics["anchor_candidates"] == pytest.approx(sum(counts) / len(SAMPLES))
    assert metrics["anchors"] == pytest.approx(sum(min(n, 3) for n in counts) / len(SAMPLES))
    assert metrics["anchors_learned"] == 1


@pytest.mark.parametrize("config", [CONFIG, CASES["cross entropy"]])
def test_chunks_change_nothing(config: ObjectiveConfig) -> None:
    results = []
    for chunk in (0, 1, 2, 512):
        draft = SmallDraft()
        out = objective(draft, replace(config, chunk_blocks=chunk))(packed(SAMPLES, config))
        assert out.loss_terms is not None
        out.loss_terms[0].backward()
        results.append((out.loss_terms[0].detach(), gradients(draft), divided(out.metrics)))
    for value, gradient, metrics in results[1:]:
        torch.testing.assert_close(value, results[0][0], rtol=0, atol=1e-12)
        for name in gradient:
            torch.testing.assert_close(gradient[name], results[0][1][name], rtol=0, atol=1e-12)
        assert metrics == pytest.approx(results[0][2], rel=1e-12, abs=1e-13)


def test_only_the_draft_gets_gradients_and_confidence_s_target_none() -> None:
    """The target's tables, features and states get none; the confidence term alone moves the draft, not its target."""
    draft, target, made = SmallDraft(), tables(), packed(SAMPLES)
    leaves = [target.embedding_VH, target.head_VH, made.features_DPF, made.teacher_DNbH]
    for leaf in leaves:
        assert leaf is not None
        leaf.requires_grad_()
    out = Objective(draft, target, CASES["confidence"])(made)
    assert out.loss_terms is not None
    out.loss_terms[0].backward()
    assert all(leaf is not None and leaf.grad is None for leaf in leaves)
    moved = gradients(draft)
    assert moved["fc.weight"].any() and moved["confidence_head.proj.weight"].any()
    # The acceptance depends on the second Markov table, the confidence itself does not.
    assert not moved["markov_head.markov_w2.weight"].any() and moved["markov_head.markov_w1.weight"].any()
    assert all(not a.requires_grad and not b.requires_grad for a, b in out.metrics.values())


def test_pure_cross_entropy_needs_no_teacher_and_other_terms_do() -> None:
    shape = FeatureShape(FEATURES, HIDDEN, teacher=False, dtype=torch.float64)
    batch = collate(SAMPLES, shape)
    generators = [sample_generator(1, 0, n) for n in range(len(SAMPLES))]
    made = draft_batch(batch, CONFIG, WINDOW, generators, torch.float64)
    pure = CASES["cross entropy"]
    out = objective(SmallDraft(), pure)(made)
    with_teacher = objective(SmallDraft(), pure)(packed(SAMPLES))
    assert torch.equal(out.loss, with_teacher.loss) and "l1_loss" not in out.metrics
    for change in ({"l1_loss_alpha": 0.5}, {"confidence_head_alpha": 1.0}):
        with pytest.raises(ValueError, match="need target_last_hidden_states"):
            objective(SmallDraft(), replace(pure, **change))(made)


def test_a_draft_without_heads() -> None:
    draft = SmallDraft()
    draft.confidence_head = None  # type: ignore[assignment]
    with pytest.raises(ValueError, match="the draft has no confidence head"):
        objective(draft)
    config = replace(CONFIG, confidence_head_alpha=0.0)
    value = objective(draft, config)(packed(SAMPLES)).loss
    with torch.no_grad():
        draft.markov_head.markov_w2.weight.zero_()
    without_term = objective(draft, config)(packed(SAMPLES)).loss
    draft.markov_head = None  # type: ignore[assignment]
    assert torch.equal(objective(draft, config)(packed(SAMPLES)).loss, without_term) and value != without_term


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"ce_loss_alpha": -0.1}, "ce_loss_alpha is -0.1"),
        ({"l1_loss_alpha": math.nan}, "l1_loss_alpha is nan"),
        ({"confidence_head_alpha": math.inf}, "confidence_head_alpha is inf"),
        ({"ce_loss_alpha": 0, "l1_loss_alpha": 0, "confidence_head_alpha": 0}, "are all 0"),
        ({"block_size": 0}, "block_size is 0"),
        ({"mask_token_id": -1}, "mask_token_id is -1"),
        ({"num_anchors": 0}, "num_anchors is 0"),
        ({"anchor_rule": "any"}, "anchor_rule is 'any'"),
        ({"loss_decay_gamma": -1.0}, "loss_decay_gamma is -1.0"),
        ({"chunk_blocks": -1}, "chunk_blocks is -1"),
    ],
)
def test_config_is_checked(change: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        replace(CONFIG, **change)


def test_an_infinite_term_of_an_unlearned_row_does_not_count() -> None:
    made = packed([SAMPLES[0]])
    assert made.teacher_DNbH is not None
    states = made.teacher_DNbH.masked_fill(~made.blocks.eval_mask[..., None], torch.nan)
    clean = objective(SmallDraft())(made)
    dirty = objective(SmallDraft())(replace(made, teacher_DNbH=states))
    assert not made.blocks.eval_mask.all() and torch.equal(clean.loss, dirty.loss)
    for name, pair in dirty.metrics.items():
        assert all(torch.equal(a, b) for a, b in zip(pair, clean.metrics[name], strict=True)), name


def test_metrics_of_halves_add_up() -> None:
    draft = SmallDraft()
    whole = divided(add_pairs([objective(draft)(packed(SAMPLES)).metrics]))
    parts = [objective(draft)(packed(SAMPLES[a:b], first=a)).metrics for a, b in ((0, 2), (2, 5))]
    assert divided(add_pairs(parts)) == pytest.approx(whole, rel=1e-13, abs=1e-13)
    with pytest.raises(ValueError, match="each micro-batch needs the same"):
        add_pairs([parts[0], {"acc": parts[1]["acc"]}])
    with pytest.raises(ValueError, match=r"metric a has shapes \[\[2\], \[3\]\]"):
        add_pairs([{"a": (torch.ones(n), torch.ones(()))} for n in (2, 3)])
    nothing = divided({"a": (torch.zeros(()), torch.zeros(())), "b": (torch.ones(2), torch.tensor([2.0, 0.0]))})
    assert math.isnan(nothing["a"]) and nothing["b_0"] == 0.5 and math.isnan(nothing["b_1"])


def test_inputs_are_cast_for_the_draft_and_terms_stay_fp32() -> None:
    draft = SmallDraft(dtype=torch.bfloat16)
    made = packed(SAMPLES)
    out = Objective(draft, tables(torch.bfloat16), CONFIG, dtype=torch.bfloat16)(made)
    exact = objective(SmallDraft())(made)
    assert out.loss_terms is not None and out.loss.dtype == torch.float64
    assert float(out.loss.detach()) == pytest.approx(float(exact.loss.detach()), rel=0.02)
    out.loss_terms[0].backward()
    assert draft.fc.weight.grad is not None and draft.fc.weight.grad.dtype == torch.bfloat16
    with pytest.raises(RuntimeError):
        objective(draft)(made)


def test_a_norm_left_out_of_the_target_is_seen() -> None:
    """The teacher's distribution is softmax(head state), of the state after the final norm, to the last digit."""
    made = packed([SAMPLES[0]])
    assert made.teacher_DNbH is not None
    head = tables().head_VH
    probabilities = (made.teacher_DNbH @ head.T).softmax(-1)
    top = probabilities.amax(-1)[made.blocks.eval_mask].mean()
    scaled = replace(made, teacher_DNbH=made.teacher_DNbH * 3.0)
    got, other = (divided(objective(SmallDraft())(b).metrics)["teacher_top1_prob"] for b in (made, scaled))
    assert got == pytest.approx(float(top), rel=1e-12) and abs(other - got) > 0.05
