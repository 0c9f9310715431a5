"""Sequential temperature scaling of a drafter's confidences, and the file beside a checkpoint that keeps it.
dspark.md 6.2.

Letters: N rollouts, each one block that was verified; Y drafts of a block (gamma).
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..checkpoint.reader import read_json_object
from .reliability import BINS, Reliability, auc, expected_calibration_error, reliability_bins
from .schedule import survival

FILE_NAME = "dspark_calibration.json"
SCHEMA = 1
FILE_LIMIT = 1 << 20
MOST_DRAFTS = 1024

GRID = tuple(2 ** (-2 + 5 * step / 60) for step in range(61))
"""Temperatures that are tried: 0.25 to 8, each 6 % above the one before, 1 among them."""


@dataclass(frozen=True)
class Rollouts:
    """Verified blocks. logit_NY FP64: confidence logits as the head gives them. accepted_N int64: drafts that the
    acceptance rule took, before any stop or limit cut them off. width_N int64: rows that were verified.

    ValueError for shapes that differ, logits that are not finite, widths that are not 1 to Y + 1, and more accepted
    drafts than were verified.
    """

    logit_NY: np.ndarray
    accepted_N: np.ndarray
    width_N: np.ndarray

    def __post_init__(self) -> None:
        for name, dtype in (("logit_NY", np.float64), ("accepted_N", np.int64), ("width_N", np.int64)):
            object.__setattr__(self, name, np.asarray(getattr(self, name)).astype(dtype))
        shapes = self.logit_NY.shape, self.accepted_N.shape, self.width_N.shape
        if self.logit_NY.ndim != 2 or not self.gamma or shapes[1:] != (shapes[0][:1],) * 2:
            raise ValueError(f"rollouts have shapes {shapes}, allowed: [N, Y] with Y from 1, [N], [N]")
        if not bool(np.isfinite(self.logit_NY).all()):
            raise ValueError("a confidence logit is not finite, allowed: finite numbers")
        for name, values_N, least, most in (
            ("width", self.width_N, 1, self.gamma + 1),
            ("accepted", self.accepted_N, 0, self.width_N - 1),
        ):
            wrong = np.flatnonzero((values_N < least) | (values_N > most))
            if len(wrong):
                bound = int(np.broadcast_to(most, values_N.shape)[wrong[0]])
                raise ValueError(f"{name} of rollout {wrong[0]} is {values_N[wrong[0]]}, allowed: {least} to {bound}")

    @property
    def gamma(self) -> int:
        return int(self.logit_NY.shape[1])

    def full(self) -> "Rollouts":
        """Those of which all drafts were verified. What is cut for room alone (a limit near) may be left out without
        bias; what was cut for its confidence may not, so collect with all drafts verified."""
        keep_N = self.width_N == self.gamma + 1
        return Rollouts(self.logit_NY[keep_N], self.accepted_N[keep_N], self.width_N[keep_N])

    def labels(self) -> np.ndarray:
        """bool [N, Y]: whether the draft and all before it were accepted.

        ValueError unless every block was verified whole: of what was not, nobody knows.
        """
        cut = np.flatnonzero(self.width_N != self.gamma + 1)
        if len(cut):
            raise ValueError(
                f"{len(cut)} of {len(self.width_N)} rollouts were not verified whole, the first is {cut[0]} with width "
                f"{self.width_N[cut[0]]}, allowed: {self.gamma + 1} rows each (see Rollouts.full)"
            )
        if not len(self.width_N):
            raise ValueError("there are no rollouts, allowed: 1 or more")
        label_NY: np.ndarray = self.accepted_N[:, None] > np.arange(self.gamma)
        return label_NY


@dataclass(frozen=True)
class Calibration:
    """What was fitted, and how good it is; numbers by draft in order.

    temperatures: finite, above 0. ece_before, ece_after: expected calibration error of survivals, 0 to 1, with
    temperatures 1 and these. auc_before, auc_after: of survivals, None where all outcomes were alike. rollouts: blocks
    that it comes from. ValueError naming the field otherwise.
    """

    gamma: int
    temperatures: tuple[float, ...]
    ece_before: tuple[float, ...]
    ece_after: tuple[float, ...]
    auc_before: tuple[float | None, ...]
    auc_after: tuple[float | None, ...]
    rollouts: int

    def __post_init__(self) -> None:
        for name, most in (("gamma", MOST_DRAFTS), ("rollouts", 1 << 62)):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise ValueError(f"{name} is {value!r}, allowed: a whole number from 1 to {most}")
        for item in fields(self)[1:-1]:
            object.__setattr__(self, item.name, self._numbers(item.name))

    def _numbers(self, name: str) -> tuple[float | None, ...]:
        values, shares = getattr(self, name), name != "temperatures"
        most = 1.0 if shares else sys.float_info.max
        if not isinstance(values, list | tuple) or len(values) != self.gamma:
            raise ValueError(f"{name} is {str(values)[:100]}, allowed: {self.gamma} numbers, as many as gamma")
        for value in values:
            good = type(value) in (int, float) and 0 <= value <= most and (shares or value > 0)
            if not good and not (value is None and name.startswith("auc")):
                allowed = "0 to 1" if shares else "finite numbers above 0"
                raise ValueError(f"{name} has {repr(value)[:100]}, allowed: {allowed}")
        return tuple(None if value is None else float(value) for value in values)

    def save(self, folder: Path | str) -> Path:
        """Write `dspark_calibration.json` into a checkpoint's folder, whole or not at all; returns its path. ValueError
        where it cannot be written."""
        path = Path(folder) / FILE_NAME
        part = path.with_name(FILE_NAME + ".part")
        try:
            part.write_text(json.dumps({"schema": SCHEMA, **asdict(self)}, indent=2) + "\n", encoding="utf-8")
            part.replace(path)
        except OSError as problem:
            raise ValueError(f"{path} could not be written: {problem}") from problem
        return path


def load_calibration(folder: Path | str, gamma: int) -> Calibration | None:
    """The calibration beside a checkpoint; None where there is none.

    ValueError naming the file, for what is no calibration of schema 1, and for one of another gamma, naming both.
    """
    path = Path(folder) / FILE_NAME
    if not path.exists() and not path.is_symlink():
        return None
    calibration = _parsed(read_json_object(path, FILE_LIMIT), path)
    if calibration.gamma != gamma:
        raise ValueError(
            f"{path} is for gamma {calibration.gamma}, asked for is {gamma}; allowed: the same, for confidences depend "
            "on it (calibrate again, or take the file away)"
        )
    return calibration


def fit_temperatures(rollouts: Rollouts, grid: Sequence[float] = GRID, bins: int = BINS) -> tuple[float, ...]:
    """A temperature for each draft: that of the grid with the least calibration error of the draft's survival, those of
    the drafts before it being fixed; of equal errors the one nearest to 1, then the smaller.

    The rollouts are of temperatures 1 and verified whole. ValueError otherwise, and for a grid that is not of finite
    numbers above 0.
    """
    if not grid or not all(math.isfinite(value) and value > 0 for value in grid):
        raise ValueError(f"grid is {str(list(grid))[:100]}, allowed: some finite numbers above 0")
    tried, label_NY = sorted(grid, key=lambda value: (abs(math.log(value)), value)), rollouts.labels()
    found: list[float] = []
    before_N = np.ones(len(label_NY))
    for draft in range(rollouts.gamma):
        logit_N1 = torch.from_numpy(rollouts.logit_NY[:, draft : draft + 1])
        survivals = [before_N * survival(logit_N1, [value]).numpy()[:, 0] for value in tried]
        errors = [expected_calibration_error(each, label_NY[:, draft], bins) for each in survivals]
        best = errors.index(min(errors))
        found.append(tried[best])
        before_N = survivals[best]
    return tuple(found)


def calibrate(rollouts: Rollouts, judged: Rollouts | None = None) -> Calibration:
    """Fit temperatures on some rollouts and say what they change on others, by default on the same, which flatters.

    ValueError as of `fit_temperatures`, and where the two differ in gamma.
    """
    judged = rollouts if judged is None else judged
    if judged.gamma != rollouts.gamma:
        raise ValueError(f"rollouts are of gamma {rollouts.gamma} and judged of {judged.gamma}, allowed: the same")
    temperatures, label_NY = fit_temperatures(rollouts), judged.labels()
    before, after = (
        list(zip(rollout_survivals(judged, each).T, label_NY.T, strict=True)) for each in (None, temperatures)
    )
    return Calibration(
        gamma=rollouts.gamma,
        temperatures=temperatures,
        ece_before=tuple(expected_calibration_error(*pair) for pair in before),
        ece_after=tuple(expected_calibration_error(*pair) for pair in after),
        auc_before=tuple(auc(*pair) for pair in before),
        auc_after=tuple(auc(*pair) for pair in after),
        rollouts=len(rollouts.width_N),
    )


def rollout_survivals(rollouts: Rollouts, temperatures: Sequence[float] | None = None) -> np.ndarray:
    """FP64 [N, Y]: the survivals that these temperatures give, 1 by default."""
    values: np.ndarray = survival(torch.from_numpy(rollouts.logit_NY), temperatures).numpy()
    return values


def reliability_panels(rollouts: Rollouts, temperatures: Sequence[float]) -> dict[str, dict[str, Reliability]]:
    """What `reliability_plot` draws: for each draft the survivals before and after. ValueError as of the fit."""
    label_NY = rollouts.labels()
    sides = {"before": rollout_survivals(rollouts), "after": rollout_survivals(rollouts, temperatures)}
    return {
        f"draft {draft + 1}": {
            name: reliability_bins(side_NY[:, draft], label_NY[:, draft]) for name, side_NY in sides.items()
        }
        for draft in range(rollouts.gamma)
    }


def _parsed(data: dict[str, Any], path: Path) -> Calibration:
    names = {item.name for item in fields(Calibration)}
    schema = data.pop("schema", None)
    if type(schema) is not int or schema != SCHEMA:
        raise ValueError(f"{path}: schema is {str(schema)[:100]}, allowed: {SCHEMA}")
    if data.keys() != names:
        raise ValueError(f"{path}: fields are {str(sorted(data))[:300]}, allowed: {sorted(names)} and schema")
    try:
        return Calibration(**data)
    except ValueError as problem:
        raise ValueError(f"{path}: {problem}") from problem
