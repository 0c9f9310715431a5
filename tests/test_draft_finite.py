"""In w8a8 a drafter's rows that are not finite are named; in other numerics what comes of them is not proposed."""

import pytest
import torch

from meshspark.launch.drafting import Drafting, make_proposer
from meshspark.launch.engine import Engine
from meshspark.models.checkpoint.synthetic import random_weights
from meshspark.models.dspark.finite import FiniteProposer
from meshspark.models.int8.finite import NonFiniteActivation
from meshspark.models.numerics import numerics
from meshspark.models.request import SamplingParams
from meshspark.models.v4.config import PRESETS
from meshspark.models.v4.model import Model
from meshspark.parallel.groups import Groups

KINDS = {"dspark": 5, "mtp": 1}


def drafting_engine(mode: str, kind: str, spoiled: str | None) -> Engine:
    """An engine of random weights, one tensor of whose drafter may be infinite in one place."""
    config = PRESETS[f"tiny-{kind}"]()
    weights = random_weights(config, 5, numerics(mode), draft=True)
    if spoiled is not None:
        weights[spoiled][3] = float("inf")
    model = Model(config, weights, Groups.single(), numerics(mode))
    drafting = Drafting(kind, KINDS[kind])
    proposer = make_proposer(drafting, weights, model)
    assert isinstance(proposer, FiniteProposer) == (mode == "w8a8")
    return Engine(model, requests=1, max_context=64, **drafting.arguments(proposer))


def ids_of(engine: Engine) -> list[int]:
    engine.add_request([5, 9, 200], SamplingParams(6))
    ids: list[int] = []
    while engine.active:
        for event in engine.step():
            ids += event.token_ids
    return ids


@pytest.mark.parametrize("kind", KINDS)
def test_w8a8_names_the_drafter_and_its_stage(kind: str) -> None:
    assert len(ids_of(drafting_engine("w8a8", kind, None))) == 6
    engine = drafting_engine("w8a8", kind, "mtp.0.attn.q_norm.weight")
    engine.add_request([5, 9, 200], SamplingParams(6))
    if kind == "mtp":
        # The prompt's end, behind which the first draft is made, has a step of its own.
        engine.step()
    with pytest.raises(NonFiniteActivation, match=r"drafter, stage \w+, row 0: NaN or infinity in a row"):
        engine.step()


@pytest.mark.parametrize("kind", KINDS)
def test_other_numerics_propose_nothing_and_write_the_same(kind: str) -> None:
    want = ids_of(drafting_engine("float32", kind, None))
    engine = drafting_engine("float32", kind, "mtp.0.attn.q_norm.weight")
    assert ids_of(engine) == want
    assert engine.metrics()["drafts"]["proposed"] == 0


def test_scales_are_forgotten_with_each_check() -> None:
    from meshspark.models.dspark.finite import DraftScales

    scales = DraftScales()
    scales("query", torch.tensor([1.0, float("nan")]))
    with pytest.raises(NonFiniteActivation, match="drafter, stage query, row 1"):
        scales.check()
    scales("query", torch.ones(2))
    scales.check()
