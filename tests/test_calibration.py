"""Calibration: temperatures that are known come back, measures against their definitions, the file and its faults."""

import json
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshspark.models.dspark.calibration import (
    FILE_NAME,
    GRID,
    Calibration,
    Rollouts,
    calibrate,
    fit_temperatures,
    load_calibration,
    reliability_panels,
    rollout_survivals,
)
from meshspark.models.dspark.reliability import auc, expected_calibration_error, reliability_bins, reliability_plot

HEAT = (0.5, 2.0, 1.0, 3.0, 0.7, 1.4, 2.5)
GOOD = Calibration(2, (0.5, 2.0), (0.1, 0.2), (0.05, 0.1), (0.8, None), (0.8, None), 1000)


def rollouts(gamma: int, count: int = 20000, seed: int = 1) -> Rollouts:
    """Blocks whose true confidences are the logits by HEAT, mostly high, as a drafter's are."""
    rng = np.random.default_rng(seed)
    true_NY = rng.normal(1.5, 1.2, (count, gamma))
    taken_NY = rng.random((count, gamma)) < 1 / (1 + np.exp(-true_NY))
    return Rollouts(true_NY * HEAT[:gamma], taken_NY.cumprod(1).sum(1), np.full(count, gamma + 1))


@pytest.mark.parametrize("gamma", [1, 3, 5, 7])
def test_known_temperatures_come_back(gamma: int) -> None:
    data, held_out = rollouts(gamma), rollouts(gamma, seed=2)
    calibration = calibrate(data, held_out)
    for found, true in zip(calibration.temperatures, HEAT, strict=False):
        assert abs(math.log(found / true)) < 0.2, f"{found} for {true}"
        assert found in GRID
    assert calibration.gamma == gamma and calibration.rollouts == 20000
    for before, after in zip(calibration.ece_before, calibration.ece_after, strict=True):
        assert after < min(before, 0.02)
    assert sum(calibration.ece_after) < sum(calibration.ece_before) / 2
    assert calibration.auc_after[0] == calibration.auc_before[0], "one temperature changes no order"
    assert all(
        after > before - 0.002 for before, after in zip(calibration.auc_before, calibration.auc_after, strict=True)
    )
    assert calibrate(data).temperatures == calibration.temperatures


def test_each_draft_is_fitted_behind_those_before_it() -> None:
    """More drafts change nothing of the first ones, and other first ones do change the later."""
    data = rollouts(5, 4000)
    whole = fit_temperatures(data)
    shorter = Rollouts(data.logit_NY[:, :2], data.accepted_N.clip(max=2), np.full(len(data.width_N), 3))
    assert fit_temperatures(shorter) == whole[:2]
    scaled = data.logit_NY.copy()
    scaled[:, 0] *= 4
    assert fit_temperatures(replace(data, logit_NY=scaled))[1:] == whole[1:], "the first takes it all up"
    assert abs(math.log(fit_temperatures(replace(data, logit_NY=scaled))[0] / whole[0] / 4)) < 0.01
    stuck = fit_temperatures(replace(data, logit_NY=scaled * np.array([100, 1, 1, 1, 1])))
    assert stuck[0] == GRID[-1] and stuck[1] != whole[1], "what the first could not take up, the second does"


def test_a_fit_is_the_best_of_the_grid_by_definition() -> None:
    """The same search with the measure spelled out, bin by bin."""
    data, grid, before = rollouts(2, 400), (0.5, 1.0, 2.0), np.ones(400)
    for draft, found in enumerate(fit_temperatures(data, grid)):
        label = data.accepted_N > draft
        errors = {}
        for heat in grid:
            chance = before / (1 + np.exp(-data.logit_NY[:, draft] / heat))
            bins = [(chance >= b / 20) & ((chance < (b + 1) / 20) | (b == 19)) for b in range(20)]
            errors[heat] = sum(abs(chance[b].sum() - label[b].sum()) for b in bins) / 400
            measured = expected_calibration_error(chance, label)
            assert measured == pytest.approx(errors[heat], abs=1e-12)
        assert errors[found] == min(errors.values())
        before = before / (1 + np.exp(-data.logit_NY[:, draft] / found))


def test_of_equal_errors_the_temperature_nearest_to_1_is_taken() -> None:
    even = Rollouts(np.zeros((10, 1)), np.arange(10) % 2, np.full(10, 2))
    assert fit_temperatures(even) == (1.0,)
    assert fit_temperatures(even, (4.0, 2.0, 0.5, 0.25)) == (0.5,)
    assert GRID[0] == 0.25 and GRID[-1] == 8 and 1.0 in GRID and len(GRID) == 61


def test_order_within_a_draft_is_kept() -> None:
    """Of two blocks that are alike but for one draft, the surer stays the surer, whatever the temperatures."""
    data = rollouts(3, 500)
    for draft in range(3):
        same = np.repeat(data.logit_NY[:1], 500, axis=0)
        same[:, draft] = data.logit_NY[:, draft]
        pair = replace(data, logit_NY=same)
        before, after = (rollout_survivals(pair, each)[:, draft] for each in (None, HEAT[:3]))
        assert np.array_equal(before.argsort(kind="stable"), after.argsort(kind="stable"))


def test_what_was_not_verified_whole_is_refused_or_left_out() -> None:
    data = rollouts(3, 300)
    width = data.width_N.copy()
    width[[7, 9]] = (3, 1)
    cut = Rollouts(data.logit_NY, np.minimum(data.accepted_N, width - 1), width)
    for use in (fit_temperatures, calibrate, lambda each: reliability_panels(each, (1.0,) * 3)):
        with pytest.raises(ValueError, match="2 of 300 rollouts were not verified whole, the first is 7 with width 3"):
            use(cut)
    whole = cut.full()
    assert len(whole.width_N) == 298
    assert np.array_equal(whole.logit_NY, np.delete(data.logit_NY, [7, 9], axis=0))
    assert np.array_equal(whole.labels(), np.delete(data.labels(), [7, 9], axis=0))
    with pytest.raises(ValueError, match="there are no rollouts"):
        fit_temperatures(Rollouts(np.zeros((0, 3)), np.zeros(0), np.zeros(0)))


def test_labels_are_prefixes() -> None:
    data = Rollouts(np.zeros((4, 3)), [0, 1, 2, 3], [4, 4, 4, 4])
    assert data.labels().tolist() == [[False] * 3, [True, False, False], [True, True, False], [True] * 3]


@pytest.mark.parametrize(
    ("logits", "accepted", "width", "message"),
    [
        (np.zeros(3), [0] * 3, [2] * 3, "rollouts have shapes"),
        (np.zeros((3, 0)), [0] * 3, [1] * 3, "rollouts have shapes"),
        (np.zeros((3, 1)), [0] * 2, [2] * 3, "rollouts have shapes"),
        (np.array([[1.0], [math.nan]]), [0, 0], [2, 2], "a confidence logit is not finite"),
        (np.zeros((2, 2)), [0, 0], [3, 4], "width of rollout 1 is 4, allowed: 1 to 3"),
        (np.zeros((2, 2)), [0, 0], [0, 3], "width of rollout 0 is 0, allowed: 1 to 3"),
        (np.zeros((2, 2)), [0, 2], [3, 2], "accepted of rollout 1 is 2, allowed: 0 to 1"),
        (np.zeros((2, 2)), [-1, 2], [3, 3], "accepted of rollout 0 is -1, allowed: 0 to 2"),
    ],
)
def test_wrong_rollouts_are_refused(logits, accepted, width, message) -> None:
    with pytest.raises(ValueError, match=message):
        Rollouts(logits, accepted, width)


def test_wrong_fits_are_refused() -> None:
    for grid in ((), (1.0, 0.0), (math.nan,), (math.inf,)):
        with pytest.raises(ValueError, match="grid is"):
            fit_temperatures(rollouts(1, 10), grid)
    with pytest.raises(ValueError, match="rollouts are of gamma 2 and judged of 3"):
        calibrate(rollouts(2, 10), rollouts(3, 10))


# Measures


def test_bins_by_hand() -> None:
    got = reliability_bins(
        np.array([0.0, 0.04, 0.05, 1.0, 0.96, 0.5]), np.array([True, False, True, True, False, False])
    )
    assert got.count_B.tolist() == [2, 1, *[0] * 8, 1, *[0] * 8, 2] and len(got.count_B) == 20
    assert got.confidence_B[[0, 1, 10, 19]].tolist() == [0.02, 0.05, 0.5, 0.98]
    assert got.accepted_B[[0, 1, 10, 19]].tolist() == [0.5, 1, 0, 0.5]
    assert np.isnan(got.accepted_B[[2, 9, 18]]).all() and np.isnan(got.confidence_B[[2, 9, 18]]).all()
    assert got.error == pytest.approx((2 * 0.48 + 0.95 + 0.5 + 2 * 0.48) / 6)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=40))
def test_auc_is_its_definition(outcomes: list[tuple[int, bool]]) -> None:
    yes, no = ([value for value, label in outcomes if label is side] for side in (True, False))
    got = auc(np.array([value / 7 for value, _ in outcomes]), np.array([label for _, label in outcomes]))
    if not yes or not no:
        assert got is None
        return
    wins = sum((a > b) + (a == b) / 2 for a in yes for b in no)
    assert got == pytest.approx(wins / (len(yes) * len(no)), abs=1e-12)


def test_wrong_outcomes_are_refused() -> None:
    label = np.array([True, False])
    for measure in (auc, expected_calibration_error):
        with pytest.raises(ValueError, match="there are no outcomes"):
            measure(np.zeros(0), np.zeros(0, dtype=bool))
        for confidence, outcome in ((np.zeros(3), label), (np.zeros((2, 2)), label), (np.zeros(2), np.array([1, 0]))):
            with pytest.raises(ValueError, match="as many outcomes of bool"):
                measure(confidence, outcome)
        with pytest.raises(ValueError, match="a confidence is"):
            measure(np.array([math.nan, 0.5]), label)
    with pytest.raises(ValueError, match="outside of its range"):
        reliability_bins(np.array([1.1, 0.5]), label)
    with pytest.raises(ValueError, match="bins is 0"):
        reliability_bins(np.array([0.1, 0.5]), label, 0)


# The file


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    assert load_calibration(tmp_path, 2) is None
    assert GOOD.save(tmp_path) == tmp_path / FILE_NAME
    assert load_calibration(tmp_path, 2) == GOOD
    assert [each.name for each in tmp_path.iterdir()] == ["dspark_calibration.json"]
    assert json.loads((tmp_path / FILE_NAME).read_text())["schema"] == 1
    fitted = calibrate(rollouts(3, 200))
    fitted.save(tmp_path)
    assert load_calibration(tmp_path, 3) == fitted, "written over, to the last bit"
    with pytest.raises(ValueError, match=r"is for gamma 3, asked for is 5"):
        load_calibration(tmp_path, 5)
    with pytest.raises(ValueError, match="could not be written"):
        GOOD.save(tmp_path / "nowhere")


FAULTS = {
    "schema": ({"schema": 2}, "schema is 2, allowed: 1"),
    "schema of bool": ({"schema": True}, "schema is True"),
    "no schema": ({"schema": None}, "schema is None"),
    "field too many": ({"more": 1}, "fields are"),
    "gamma 0": ({"gamma": 0}, "gamma is 0, allowed"),
    "gamma of another kind": ({"gamma": 2.0}, "gamma is 2.0, allowed"),
    "gamma out of size": ({"gamma": 10**9}, "gamma is 1000000000, allowed"),
    "no rollouts": ({"rollouts": 0}, "rollouts is 0, allowed"),
    "too few temperatures": ({"temperatures": [1.0]}, "temperatures is .*, allowed: 2 numbers"),
    "text": ({"temperatures": "ab"}, "temperatures is ab, allowed: 2 numbers"),
    "temperature 0": ({"temperatures": [1.0, 0]}, "temperatures has 0, allowed: finite"),
    "temperature below": ({"temperatures": [1.0, -2.0]}, "temperatures has -2.0"),
    "temperature NaN": ({"temperatures": [1.0, math.nan]}, "temperatures has nan"),
    "temperature infinite": ({"temperatures": [math.inf, 1.0]}, "temperatures has inf"),
    "temperature beyond floats": ({"temperatures": [10**400, 1.0]}, "temperatures has 1000"),
    "temperature of text": ({"temperatures": [1.0, "2"]}, "temperatures has '2'"),
    "temperature of bool": ({"temperatures": [1.0, True]}, "temperatures has True"),
    "temperature absent": ({"temperatures": [1.0, None]}, "temperatures has None"),
    "error above 1": ({"ece_after": [0.1, 1.1]}, "ece_after has 1.1, allowed: 0 to 1"),
    "error absent": ({"ece_before": [0.1, None]}, "ece_before has None"),
    "auc below 0": ({"auc_before": [-0.1, None]}, "auc_before has -0.1"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_bad_files_are_refused(name: str, tmp_path: Path) -> None:
    change, message = FAULTS[name]
    (tmp_path / FILE_NAME).write_text(json.dumps({"schema": 1, **asdict(GOOD), **change}))
    with pytest.raises(ValueError, match=message) as caught:
        load_calibration(tmp_path, 2)
    assert str(tmp_path / FILE_NAME) in str(caught.value)


RAW = {
    "empty": b"",
    "not JSON": b"{",
    "no object": b"[1]",
    "not text": b"\xff\xfe",
    "too deep": b'{"schema":' + b"[" * 200000,
    "too large": b" " * (1 << 20) + b"{}",
    "a field twice": b'{"schema": 1, "schema": 1}',
    "a field too few": b'{"schema": 1}',
}


@pytest.mark.parametrize("name", RAW)
def test_what_is_no_calibration_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(RAW[name])
    with pytest.raises(ValueError, match=FILE_NAME):
        load_calibration(tmp_path, 2)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(ValueError, match="not a file"):
        load_calibration(tmp_path, 2)
    (tmp_path / FILE_NAME).rmdir()
    (tmp_path / FILE_NAME).symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match=FILE_NAME):
        load_calibration(tmp_path, 2)


# The plot


def test_plot_shows_each_draft(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    data = rollouts(2, 500)
    panels = reliability_panels(data, HEAT[:2])
    assert [*panels] == ["draft 1", "draft 2"]
    assert all([*curves] == ["before", "after"] for curves in panels.values())
    figures = calibrate(data)
    assert tuple(curves["before"].error for curves in panels.values()) == figures.ece_before
    reliability_plot(panels, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    for path in (tmp_path / "nowhere" / "plot.png", tmp_path / "plot.what"):
        with pytest.raises(ValueError, match="could not be written"):
            reliability_plot(panels, path)


def test_plot_says_what_it_misses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"pip install 'meshspark\[plot\]'"):
        reliability_plot({}, tmp_path / "plot.png")
