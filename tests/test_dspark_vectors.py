"""The drafter against numbers that are not ours: every tensor of every stored case, in FP64, drafts exact."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from draft_scene import Pages, draft_model
from naive_dspark import naive_context, naive_draft
from safetensors.torch import load_file

from meshspark.models.dspark import draft as draft_module
from meshspark.models.dspark import plan as plan_module
from meshspark.models.dspark import projector, stage
from meshspark.models.dspark.context import name_rows, write_context
from meshspark.models.dspark.draft import draft
from meshspark.models.dspark.drafter import Drafter
from meshspark.models.dspark.plan import DraftBlock, plan_draft
from meshspark.models.dspark.shape import DraftShape
from meshspark.models.functions import rms_norm
from meshspark.models.v4 import projections
from meshspark.models.v4.config import V4Config, from_config_json
from meshspark.models.v4.moe import MoELayer
from meshspark.parallel.groups import Groups

VECTORS = Path(__file__).parent / "vectors" / "dspark"
CASES = tuple(sorted(path.stem for path in VECTORS.glob("case*.json")))
SLOT = 1


@cache
def checkpoint(name: str) -> Mapping[str, torch.Tensor]:
    """The stored tensors in FP64, routed experts stacked."""
    raw: dict[str, torch.Tensor] = {}
    for path in sorted((VECTORS / name).glob("*.safetensors")):
        raw |= load_file(path)
    held = {key: w.double() for key, w in raw.items() if ".experts." not in key}
    fronts = {key.split(".experts.")[0] for key in raw if ".experts." in key}
    for front in fronts:
        for w in ("w1", "w2", "w3"):
            count = sum(key.startswith(f"{front}.experts.") and key.endswith(f".{w}.weight") for key in raw)
            each = [raw[f"{front}.experts.{number}.{w}.weight"].double() for number in range(count)]
            held[f"{front}.experts.{w}.weight"] = torch.stack(each)
    return held


@cache
def case_of(name: str) -> tuple[dict[str, Any], Mapping[str, torch.Tensor], V4Config]:
    about = json.loads((VECTORS / f"{name}.json").read_text(encoding="utf-8"))
    values = {
        key: v.double() if v.is_floating_point() else v for key, v in load_file(VECTORS / f"{name}.safetensors").items()
    }
    # The stored widths are none that FP4 holds, and the tensors are floats.
    return about, values, from_config_json({**about["config"], "expert_dtype": "fp8"})


def close(got: torch.Tensor, want: torch.Tensor, name: str) -> None:
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6, msg=lambda text: f"{name}: {text}")


def step_taps(values: Mapping[str, torch.Tensor], number: int) -> torch.Tensor:
    """Taps as the target exports them: the mean over the streams of each layer, side by side, rounded to FP32. What
    follows was made from the rounded ones."""
    streams = values["in.tap_streams" if number == 0 else f"step{number}.tap_streams"]
    taps = values[f"step{number}.taps"]
    close(streams.mean(2).flatten(1), taps, "taps")
    return taps


@contextmanager
def recorded(patch: pytest.MonkeyPatch) -> Iterator[dict[str, list[torch.Tensor]]]:
    """What the stages' parts gave, stage by stage, under the names of the vectors."""
    seen: dict[str, list[torch.Tensor]] = {}

    def watch(module: Any, name: str, note: Callable[[Any], dict[str, torch.Tensor]]) -> None:
        real = getattr(module, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            for key, value in note(result).items():
                seen.setdefault(key, []).append(value)
            return result

        patch.setattr(module, name, wrapped)

    watch(stage, "hc_pre", lambda r: {"y": r[0], "post": r[1], "comb": r[2]})
    watch(stage, "queries", lambda r: {"q": r})
    watch(stage, "stage_keys", lambda r: {"block_kv": r})
    watch(stage, "_attention", lambda r: {"attn_out": r})
    watch(stage, "stage_forward", lambda r: {"out": r})
    real_moe = MoELayer.forward

    def moe(self: MoELayer, x: torch.Tensor, *args: Any) -> Any:
        _, indices, weights = self.router.forward(x)
        result = real_moe(self, x, *args)
        parts = {"ffn_in": x, "ffn_out": result[0], "route_ids": indices, "route_weights": weights}
        for key, value in parts.items():
            seen.setdefault(key, []).append(value)
        return result

    patch.setattr(MoELayer, "forward", moe)
    yield seen


def run_case(name: str) -> None:
    """All steps of a case, with a pool of pages smaller than the window, and every stored tensor."""
    about, values, config = case_of(name)
    rows = about["gamma"]
    shape = DraftShape(rows, rows, 2)
    drafter = draft_model(
        Groups.single(), "float64", config, checkpoint(about["checkpoint"]), shape, about["kv_qdq_group"]
    )
    pages = Pages(drafter, 3, max(config.sliding_window, 1 + rows), 4, seed=5)
    for entry in about["steps"]:
        number, at = entry["step"], f"step{entry['step']}."
        want = {key.removeprefix(at): v for key, v in values.items() if key.startswith(at)}
        feed(drafter, pages, step_taps(values, number), entry, want)
        with pytest.MonkeyPatch.context() as patch, recorded(patch) as seen:
            check_draft(drafter, pages, entry, want, seen)


def feed(
    drafter: Drafter, pages: Pages, taps: torch.Tensor, entry: dict[str, Any], want: Mapping[str, torch.Tensor]
) -> None:
    """Write the step's context rows; those that were not accepted must leave no trace."""
    kept, position = entry["acc"], entry["pos0"] + np.arange(entry["rows"])
    main = projector.project(taps, drafter)
    close(main[:kept], want["main_x"], "main_x")
    keys = projector.context_keys(main, torch.from_numpy(position), drafter)
    close(keys[:, :kept], want["context_kv"], "context_kv")
    chunk = drafter.config.sliding_window
    for first in range(0, len(position), chunk):
        part = slice(first, first + chunk)
        pages.extend(SLOT, int(position[part][-1]) + 1)
        rejected = position[part][max(kept - first, 0) :]
        before = pages.rows(SLOT, rejected).clone()
        count = len(position[part])
        names = name_rows(
            np.full(count, SLOT),
            np.full(count, pages.generation(SLOT)),
            position[part],
            np.arange(count) < kept - first,
        )
        write_context(keys[:, part], names, pages.pool, drafter)
        assert torch.equal(pages.rows(SLOT, rejected), before), "a rejected row left a trace"
    seen = want["window_positions"].tolist()
    ring = want["ring"][:, [p % chunk for p in seen]]
    close(pages.rows(SLOT, seen), ring, "ring")


def check_draft(
    drafter: Drafter, pages: Pages, entry: dict[str, Any], want: Mapping[str, torch.Tensor], seen: dict[str, list]
) -> None:
    block = DraftBlock(SLOT, entry["p"] + 1, int(want["anchor"]))
    plan = plan_draft([block], drafter, pages.pool.table)
    slab = plan.slabs[0]
    assert slab.token_T.tolist() == want["block_ids"].tolist()
    assert slab.position_T.tolist() == want["block_positions"].tolist()
    readouts: list[torch.Tensor] = []
    real = draft_module.block_readout
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_module, "block_readout", lambda *args: readouts.append(real(*args)) or readouts[-1])
        drafts = draft(plan, drafter, pages.pool.keys_MSD, keep_logits=True)
    for number in range(drafter.stages):
        check_stage(seen, number, {k.split(".", 1)[1]: v for k, v in want.items() if k.startswith(f"stage{number}.")})
    close(readouts[0][0], want["readout"], "readout")
    base = draft_module.base_logits(readouts[0], slab, drafter)
    close(base[0], want["base_logits"], "base_logits")
    assert drafts.logits is not None
    close(drafts.logits[0], want["corrected_logits"], "corrected_logits")
    assert drafts.ids[0].tolist() == want["drafts"].tolist() == entry["drafts"]
    close(drafts.confidence[0], want["confidence_logits"], "confidence_logits")
    close(torch.sigmoid(drafts.confidence[0]), want["confidence"], "confidence")


def check_stage(seen: dict[str, list], number: int, want: Mapping[str, torch.Tensor]) -> None:
    for key, name in (("y", "hc_attn_y"), ("post", "hc_attn_post"), ("comb", "hc_attn_comb")):
        close(seen[key][2 * number], want[name], f"stage{number}.{name}")
    for name in ("q", "block_kv", "attn_out", "ffn_in", "route_weights", "ffn_out", "out"):
        close(seen[name][number], want[name], f"stage{number}.{name}")
    assert torch.equal(seen["route_ids"][number], want["route_ids"])


@pytest.mark.parametrize("name", CASES)
def test_drafter_agrees_with_the_vectors(name: str) -> None:
    run_case(name)


@pytest.mark.parametrize("name", CASES)
def test_naive_drafter_agrees_with_the_vectors(name: str) -> None:
    about, values, config = case_of(name)
    weights, taps = checkpoint(about["checkpoint"]), torch.zeros(0)
    for entry in about["steps"]:
        number, at = entry["step"], f"step{entry['step']}."
        fresh = step_taps(values, number)[: entry["acc"]]
        taps = fresh if number == 0 else torch.cat((taps, fresh))
        context = naive_context(config, weights, taps, about["kv_qdq_group"])
        close(context[:, -entry["acc"] :], values[f"{at}context_kv"], "context_kv")
        anchor, rows = int(values[f"{at}anchor"]), about["gamma"]
        got = naive_draft(config, weights, context, anchor, rows, rows, about["kv_qdq_group"])
        for index, out in enumerate(got.stage_out):
            close(out, values[f"{at}stage{index}.out"], f"stage{index}.out")
        close(got.readout, values[f"{at}readout"], "readout")
        close(got.base, values[f"{at}base_logits"], "base_logits")
        close(got.corrected, values[f"{at}corrected_logits"], "corrected_logits")
        close(got.confidence, values[f"{at}confidence_logits"], "confidence_logits")
        assert got.drafts == values[f"{at}drafts"].tolist()


def test_there_are_vectors() -> None:
    assert len(CASES) == 6


def _taps_in_another_order(patch: pytest.MonkeyPatch) -> None:
    real = projector.project
    patch.setattr(projector, "project", lambda taps, drafter: real(taps.roll(drafter.config.hidden_size, 1), drafter))


def _taps_of_the_next_position(patch: pytest.MonkeyPatch) -> None:
    real = projector.project
    patch.setattr(projector, "project", lambda taps, drafter: real(taps.roll(-1, 0), drafter))


def _context_turned_one_further(patch: pytest.MonkeyPatch) -> None:
    real = projector.context_keys
    patch.setattr(projector, "context_keys", lambda main, position, drafter: real(main, position + 1, drafter))


def _block_turned_one_less(patch: pytest.MonkeyPatch) -> None:
    real = plan_module._slab

    def slab(*args: Any) -> Any:
        made = real(*args)
        return replace(made, position_T=made.position_T - 1)

    patch.setattr(plan_module, "_slab", slab)


def _own_rows_masked(patch: pytest.MonkeyPatch) -> None:
    """A causal mask: each row as if it were the last one of the block."""

    def attend(q: torch.Tensor, keys: torch.Tensor, hidden: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
        window, rows = hidden.shape[1], keys.shape[1] - hidden.shape[1]
        out = []
        for row in range(rows):
            masked = F.pad(hidden, (0, rows))
            masked[:, window + row + 1 :] = True
            scores = (q[row] * q.shape[2] ** -0.5) @ keys[0].T
            scores = scores.masked_fill(masked[0], float("-inf"))
            weights = torch.softmax(torch.cat((scores, sink[:, None]), dim=1), dim=1)[:, :-1]
            out.append(weights @ keys[0])
        return torch.stack(out)

    patch.setattr(stage, "attend_block", attend)


def _window_slides_with_the_row(patch: pytest.MonkeyPatch) -> None:
    real = stage.attend_block

    def attend(q: torch.Tensor, keys: torch.Tensor, hidden: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
        out = real(q, keys, hidden, sink)
        for row in range(1, len(out)):
            moved = hidden.clone()
            moved[:, :row] = True
            out[row] = real(q, keys, moved, sink)[row]
        return out

    patch.setattr(stage, "attend_block", attend)


def _sink_left_out(patch: pytest.MonkeyPatch) -> None:
    real = stage.attend_block
    patch.setattr(stage, "attend_block", lambda q, k, h, sink: real(q, k, h, sink * 0 - float("inf")))


def _no_markov_term(patch: pytest.MonkeyPatch) -> None:
    real = draft_module.markov_bias
    patch.setattr(draft_module, "markov_bias", lambda *given: 0 * real(*given))


def _markov_of_the_anchor_alone(patch: pytest.MonkeyPatch) -> None:
    real, anchors = draft_module.markov_bias, []

    def bias(previous: torch.Tensor, *rest: Any) -> torch.Tensor:
        anchors.append(previous)
        return real(anchors[0], *rest)

    patch.setattr(draft_module, "markov_bias", bias)


def _confidence_behind_the_norm(patch: pytest.MonkeyPatch) -> None:
    real = draft_module.confidence_logits

    def logits(readout: torch.Tensor, *rest: Any) -> torch.Tensor:
        return real(rms_norm(readout, torch.ones(readout.shape[1], dtype=readout.dtype), 1e-6, readout.dtype), *rest)

    patch.setattr(draft_module, "confidence_logits", logits)


def _confidence_of_the_draft_itself(patch: pytest.MonkeyPatch) -> None:
    real = draft_module.confidence_logits
    patch.setattr(draft_module, "confidence_logits", lambda x, prev, *rest: real(x, prev.roll(-1), *rest))


def _mixing_transposed(patch: pytest.MonkeyPatch) -> None:
    real = stage.hc_post
    patch.setattr(stage, "hc_post", lambda y, streams, post, mix, *rest: real(y, streams, post, mix.mT, *rest))


def _no_norm_of_each_head(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(projections, "mean_square_rsqrt", lambda x, eps: x.new_ones(()))


def _output_not_turned_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stage, "rotate", lambda x, *_, **__: x)


PLANTS = {
    "taps in another order": _taps_in_another_order,
    "taps of the next position": _taps_of_the_next_position,
    "context turned one further": _context_turned_one_further,
    "block turned one less": _block_turned_one_less,
    "causal mask": _own_rows_masked,
    "window slides with the row": _window_slides_with_the_row,
    "sink left out": _sink_left_out,
    "no markov term": _no_markov_term,
    "markov of the anchor alone": _markov_of_the_anchor_alone,
    "confidence behind the norm": _confidence_behind_the_norm,
    "confidence of the draft itself": _confidence_of_the_draft_itself,
    "mixing transposed": _mixing_transposed,
    "no norm of each head": _no_norm_of_each_head,
    "output not turned back": _output_not_turned_back,
}


@pytest.mark.parametrize("plant", PLANTS)
def test_faults_are_seen(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTS[plant](monkeypatch)
    with pytest.raises(AssertionError):
        run_case("case3_w8_g5_above")


def test_round_trip_left_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projector, "round_trip", lambda kv, rope, group: kv)
    with pytest.raises(AssertionError):
        run_case("case9_w8_g5_kvqdq")
