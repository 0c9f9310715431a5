"""Step times of the decode and prefill benchmarks as a picture: ours by numerics, the peer, and the limit."""

from collections.abc import Mapping, Sequence
from typing import Any

from .report import plotting, save_figure

WIDTH = 0.8
"""Of a load's bars together; the space between loads is the rest of 1."""


def plot(rows: Sequence[Mapping[str, Any]], path: str) -> None:
    """A panel for each case: milliseconds of a step on a logarithmic axis, the limit as a line across each of our bars.

    rows: those of the benchmark's JSON. ValueError where matplotlib is missing or the file cannot be written.
    """
    cases = list(dict.fromkeys(row["case"] for row in rows))
    figure = plotting().Figure(figsize=(8.5, 3.5 * len(cases)), layout="constrained")
    for case, panel in zip(cases, figure.subplots(len(cases), 1, squeeze=False).flatten(), strict=True):
        _panel(panel, case, [row for row in rows if row["case"] == case])
    save_figure(figure, path)


def _panel(panel: Any, case: str, rows: Sequence[Mapping[str, Any]]) -> None:
    loads = list(dict.fromkeys((row["batch"], row["rows"], row["context"]) for row in rows))
    names = list(dict.fromkeys(row["numerics"] for row in rows))
    peers = list(dict.fromkeys(row["peer_numerics"] for row in rows))
    width = WIDTH / (len(names) + len(peers))
    at = {load: place for place, load in enumerate(loads)}
    for number, name in enumerate([*names, *peers]):
        key, time = ("numerics", "ours_s") if number < len(names) else ("peer_numerics", "peer_s")
        mine = {(row["batch"], row["rows"], row["context"]): row for row in rows if row[key] == name}
        places = [at[load] - WIDTH / 2 + (number + 0.5) * width for load in mine]
        label = f"ours, {name}" if key == "numerics" else f"transformers, {name}"
        panel.bar(places, [1000 * row[time] for row in mine.values()], width, label=label)
        if key == "numerics":
            limits = [1000 * row[time] * row["limit_ratio"] for row in mine.values()]
            panel.hlines(limits, [x - width / 2 for x in places], [x + width / 2 for x in places], "black")
    panel.set_yscale("log")
    panel.set_xticks(range(len(loads)), [f"{rows} of {batch}\n{context:,}" for batch, rows, context in loads])
    panel.set(title=case, xlabel="rows of requests, context", ylabel="ms a step (black: the limit)")
    panel.legend(loc="center left", bbox_to_anchor=(1, 0.5))
