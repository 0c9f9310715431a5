"""How well confidences tell what is accepted: reliability by bins, expected calibration error, AUC, and a plot.

Letters: N rollouts or outcomes, Y drafts (gamma), B bins.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

BINS = 20
"""Equal bins of [0, 1]."""


@dataclass(frozen=True)
class Reliability:
    """By equal bins of confidence, from 0 up: count_B int64 outcomes, confidence_B and accepted_B FP64, their mean
    confidence and the share of them that was accepted; NaN in empty bins."""

    count_B: np.ndarray
    confidence_B: np.ndarray
    accepted_B: np.ndarray

    @property
    def error(self) -> float:
        """Expected calibration error, 0 to 1: mean over outcomes of how far their bin's two means are apart."""
        gap_B = np.abs(np.nan_to_num(self.confidence_B) - np.nan_to_num(self.accepted_B))
        return float((self.count_B * gap_B).sum() / self.count_B.sum())


def reliability_bins(confidence_N: np.ndarray, accepted_N: np.ndarray, bins: int = BINS) -> Reliability:
    """Outcomes (bool) by confidence, FP64 in [0, 1]; 1 is in the last bin. ValueError without outcomes, for shapes that
    differ, for confidences out of range."""
    confidence_N, accepted_N = _outcomes(confidence_N, accepted_N)
    if bins < 1:
        raise ValueError(f"bins is {bins}, allowed: 1 or more")
    if not bool(((confidence_N >= 0) & (confidence_N <= 1)).all()):
        raise ValueError("a confidence is outside of its range, allowed: 0 to 1")
    bin_N = np.minimum((confidence_N * bins).astype(np.int64), bins - 1)
    count_B = np.bincount(bin_N, minlength=bins)
    with np.errstate(invalid="ignore"):
        confidence_B = np.bincount(bin_N, confidence_N, bins) / count_B
        accepted_B = np.bincount(bin_N, accepted_N, bins) / count_B
    return Reliability(count_B, confidence_B, accepted_B)


def expected_calibration_error(confidence_N: np.ndarray, accepted_N: np.ndarray, bins: int = BINS) -> float:
    """0 to 1; arguments and errors as of `reliability_bins`."""
    return reliability_bins(confidence_N, accepted_N, bins).error


def auc(confidence_N: np.ndarray, accepted_N: np.ndarray) -> float | None:
    """How likely an accepted outcome has more confidence than one that was not, where equal confidences count half.

    From the sum of ranks, ties sharing their mean. None where all outcomes are alike. ValueError as above, and for NaN.
    """
    confidence_N, accepted_N = _outcomes(confidence_N, accepted_N)
    if bool(np.isnan(confidence_N).any()):
        raise ValueError("a confidence is NaN, allowed: numbers")
    positive = int(accepted_N.sum())
    negative = len(accepted_N) - positive
    if not positive or not negative:
        return None
    _, group_N, count_G = np.unique(confidence_N, return_inverse=True, return_counts=True)
    rank_G = count_G.cumsum() - (count_G - 1) / 2
    return float((rank_G[group_N][accepted_N].sum() - positive * (positive + 1) / 2) / (positive * negative))


def reliability_plot(panels: Mapping[str, Mapping[str, Reliability]], path: Path | str) -> None:
    """One panel for each title, in it a curve for each name ("before", "after"): the share accepted against confidence,
    points as large as their bins are full. The format is that of the file's ending.

    ValueError where matplotlib is not installed, naming the extra, or the file cannot be written.
    """
    columns = min(4, max(1, len(panels)))
    lines = -(-len(panels) // columns) or 1
    figure = _plotting().Figure(figsize=(3.2 * columns, 3.2 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for (title, curves), panel in zip(panels.items(), axes, strict=False):
        panel.plot([0, 1], [0, 1], color="0.6", linestyle=":")
        for name, each in curves.items():
            full = each.count_B > 0
            share = each.count_B[full] / max(1, each.count_B.sum())
            (line,) = panel.plot(each.confidence_B[full], each.accepted_B[full], label=f"{name}, ECE {each.error:.3f}")
            panel.scatter(each.confidence_B[full], each.accepted_B[full], s=4 + 200 * share, color=line.get_color())
        panel.set(title=title, xlabel="confidence", ylabel="share accepted", xlim=(0, 1), ylim=(0, 1))
        panel.legend(fontsize="small")
    for panel in axes[len(panels) :]:
        panel.set_axis_off()
    try:
        figure.savefig(path, dpi=100)
    except (OSError, ValueError) as problem:
        raise ValueError(f"plot is {str(path)!r}, which could not be written: {problem}") from problem


def _plotting() -> Any:
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as problem:
        raise ValueError(f"a plot needs matplotlib ({problem}); pip install 'meshspark[plot]'") from problem


def _outcomes(confidence_N: np.ndarray, accepted_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    confidence_N, accepted_N = np.asarray(confidence_N, dtype=np.float64), np.asarray(accepted_N)
    if accepted_N.dtype != np.bool_ or confidence_N.ndim != 1 or confidence_N.shape != accepted_N.shape:
        raise ValueError(
            f"confidences {confidence_N.shape} with outcomes {accepted_N.shape} of {accepted_N.dtype}, "
            "allowed: as many outcomes of bool as confidences, in one dimension"
        )
    if not len(confidence_N):
        raise ValueError("there are no outcomes, allowed: 1 or more")
    return confidence_N, accepted_N
