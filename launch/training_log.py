"""What a training run tells: a JSON line a step, a line on the screen at times, curves of loss and acceptance."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

LOG_NAME, CURVES_NAME = "log.jsonl", "curves.png"
LINE_LIMIT = 1 << 20
MOST_POINTS = 500
LOSSES = ("loss", "ce_loss", "l1_loss", "confidence_loss")
LENGTHS = ("tau_greedy", "tau_probabilistic")
POSITIONS = "accept_rate_", "accuracy_position_"


class TrainingLog:
    """The run's log.jsonl, on world rank 0 alone; whole lines, flushed as they come."""

    def __init__(self, folder: Path, steps: int) -> None:
        """Goes on behind the lines of the first `steps` steps; lines behind them, of steps that are taken again, go."""
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / LOG_NAME
        self.lines = [line for line in read_log(self._path) if line["step"] <= steps]
        partial = self._path.with_name(f"{LOG_NAME}.partial")
        partial.write_text("".join(map(_encoded, self.lines)), encoding="utf-8")
        partial.rename(self._path)
        self._file = self._path.open("a", encoding="utf-8")

    def add(self, line: Mapping[str, Any]) -> None:
        """A step's line; what is not a number becomes null."""
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        self.lines.append(clean)
        self._file.write(_encoded(clean))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _encoded(line: Mapping[str, Any]) -> str:
    return json.dumps(line) + "\n"


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log, without one that was cut off at its end. ValueError for others that are none."""
    lines: list[dict[str, Any]] = []
    if not path.exists():
        return lines
    with path.open("rb") as file:
        while (raw := file.readline(LINE_LIMIT)).endswith(b"\n"):
            try:
                line = json.loads(raw)
                if type(line["step"]) is not int:
                    raise TypeError("step")
            except (ValueError, KeyError, TypeError) as problem:
                raise ValueError(f"{path}:{len(lines) + 1}: is no line of a training log: {problem!r}") from problem
            lines.append(line)
    return lines


def show_step(line: Mapping[str, Any], steps: int, out: TextIO) -> None:
    """One line for people: loss, accepted lengths (bonus included, of greedy and of sampled drafts), rate, time."""
    lengths = [f"{line[name]:.3f}" if isinstance(line.get(name), float) else "-" for name in LENGTHS]
    print(
        f"step {line['step']} of {steps}, loss {line['loss']:.4f}, accepted {lengths[0]} greedy, {lengths[1]} sampled, "
        f"rate {line['learning_rate']:.2e}, {line['seconds']:.2f} s",
        file=out,
        flush=True,
    )


def draw_curves(lines: Sequence[Mapping[str, Any]], folder: Path) -> Path | None:
    """Loss terms, accepted lengths and acceptance by position over the steps, as curves.png; None where matplotlib
    (extra plot) is not installed or nothing was logged."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    if not lines:
        return None
    names = [name for name in lines[-1] if name.startswith(POSITIONS[0])]
    names = names or [name for name in lines[-1] if name.startswith(POSITIONS[1])]
    panels = {"loss": LOSSES, "accepted length, bonus included": LENGTHS, "acceptance by position": tuple(names)}
    figure = Figure(figsize=(13, 4), layout="constrained")
    for axes, (title, wanted) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        for name in wanted:
            points = smoothed([(line["step"], line[name]) for line in lines if isinstance(line.get(name), float)])
            if points:
                axes.plot([step for step, _ in points], [value for _, value in points], label=name)
        axes.set(title=title, xlabel="step")
        if axes.lines:
            axes.legend(fontsize="small")
    path = folder / CURVES_NAME
    partial = folder / f"{CURVES_NAME}.partial"
    figure.savefig(partial, dpi=100, format="png", metadata={"Software": None})
    partial.rename(path)
    return path


def smoothed(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """(last step, mean) of at most MOST_POINTS equal runs."""
    width = max(1, -(-len(points) // MOST_POINTS))
    runs = [points[i : i + width] for i in range(0, len(points), width)]
    return [(run[-1][0], sum(value for _, value in run) / len(run)) for run in runs]
