"""What was measured of drafters: rows for --json, tables, the picture, and reliability panels.

Letters: Y drafts of a block (gamma).
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from ..models.dspark.calibration import rollout_survivals
from ..models.dspark.reliability import Reliability, reliability_bins
from .drafter_runs import PLAIN, Drafter, Side, join_blocks, reliability
from .report import plotting, save_figure

Row = dict[str, Any]
STYLES = ("o-", "s--", "^:", "d-.")


def make_rows(sides: Sequence[Side], drafters: Sequence[Drafter], against: str | None) -> list[Row]:
    """A row for each side. over_plain, over_against: median, least and most over the rounds; against: a drafter's name
    that the others are measured over, too."""
    fits = {each.name: each.calibration for each in drafters}
    rows = []
    for side in sides:
        peers = {each.name: each for each in sides if each.domain == side.domain}
        rows.append({
            "drafter": side.name,
            "domain": side.domain,
            "requests": len(side.first.ids),
            "tokens": side.first.tokens,
            "accepted_length": side.accepted_length,
            "tokens_per_step": side.first.tokens_per_step,
            **{name: list(shares) for name, shares in side.first.acceptance.items()},
            "verified": side.first.verified,
            "accepted": side.first.accepted,
            "tokens_per_s": statistics.median(side.rates),
            "over_plain": side.over(peers[PLAIN]),
            "over_against": None if against is None else side.over(peers[against]),
            "reliability": None if side.blocks is None else reliability(side.blocks, fits[side.name]),
            "sweep": [asdict(each) for each in side.sweep],
            "parted": [list(place) for place in side.parted],
        })  # fmt: skip
    return rows


def tables(rows: Sequence[Row], against: str | None) -> list[Table]:
    """The rows for people; tables that nothing is in are left out."""
    found = [speed_table(rows, against), position_table(rows), sweep_table(rows), reliability_table(rows)]
    return [table for table in found if table.row_count]


def speed_table(rows: Sequence[Row], against: str | None) -> Table:
    """Accepted length and tokens/s, by domain and drafter."""
    more = [] if against is None else [f"over {against}", "range"]
    heads = ("domain", "drafter", "accepted length", "tokens a step", "tokens/s", "over plain", "range")
    table = Table(*heads, *more, "ids")
    for row in rows:
        ratios = [row["over_plain"], *([row["over_against"]] if more else [])]
        table.add_row(
            row["domain"],
            row["drafter"],
            _number(row["accepted_length"]),
            _number(row["tokens_per_step"]),
            _number(row["tokens_per_s"], 1),
            *(cell for ratio in ratios for cell in _spread(ratio)),
            f"{len(row['parted'])} parted" if row["parted"] else "same",
        )
    return table


def position_table(rows: Sequence[Row]) -> Table:
    """Shares of accepted drafts by position: if all before are, and with all before."""
    most = max((len(row["conditional"]) for row in rows), default=0)
    table = Table("domain", "drafter", "acceptance", *(f"draft {draft + 1}" for draft in range(most)))
    for row in rows:
        for name in ("conditional", "cumulative") if row["conditional"] else ():
            table.add_row(row["domain"], row["drafter"], name, *(_number(share, 3) for share in row[name]))
    return table


def sweep_table(rows: Sequence[Row]) -> Table:
    """What a threshold of confidence leaves of the drafts, and what becomes of them."""
    heads = ("verified", "accepted share", "tokens a step", "verified a step")
    table = Table("domain", "drafter", "threshold", *heads)
    for row in rows:
        for each in row["sweep"]:
            shares = (each["accepted_share"], each["tokens_per_step"], each["verified_per_step"])
            head = (row["domain"], row["drafter"], f"{each['threshold']:g}", f"{each['verified']:,}")
            table.add_row(*head, *map(_number, shares))
    return table


def reliability_table(rows: Sequence[Row]) -> Table:
    """Calibration error and AUC by draft; behind the arrow with the fit beside the checkpoint."""
    most = max((len((row["reliability"] or {}).get("ece_before", ())) for row in rows), default=0)
    table = Table("domain", "drafter", "blocks", "of survivals", *(f"draft {draft + 1}" for draft in range(most)))
    for row in rows:
        found = row["reliability"]
        for what, name in (("ECE", "ece"), ("AUC", "auc")) if found else ():
            before, after = found[f"{name}_before"], found[f"{name}_after"]
            cells = [_number(value, 3) for value in before]
            if after is not None:
                cells = [f"{cell} > {_number(value, 3)}" for cell, value in zip(cells, after, strict=True)]
            table.add_row(row["domain"], row["drafter"], f"{found['blocks']:,}", what, *cells)
    return table


def _number(value: float | None, places: int = 2) -> str:
    return "-" if value is None else f"{value:.{places}f}"


def _spread(ratio: tuple[float, float, float] | None) -> tuple[str, str]:
    return ("-", "-") if ratio is None else (f"{ratio[0]:.2f}", f"{ratio[1]:.2f} - {ratio[2]:.2f}")


def panels(sides: Sequence[Side], drafters: Sequence[Drafter]) -> dict[str, dict[str, Reliability]]:
    """What `reliability_plot` draws: for each drafter and draft the survivals over all domains, before and, where
    there is a fit, after."""
    found = {}
    for drafter in drafters:
        parts = [side.blocks for side in sides if side.name == drafter.name and side.blocks is not None]
        if not any(len(part.accepted_N) for part in parts):
            continue
        blocks = join_blocks(parts)
        curves = {"before": rollout_survivals(blocks)}
        if drafter.calibration is not None:
            curves["after"] = rollout_survivals(blocks, drafter.calibration.temperatures)
        label_NY = blocks.labels()
        for draft in range(blocks.gamma):
            found[f"{drafter.name}, draft {draft + 1}"] = {
                name: reliability_bins(side_NY[:, draft], label_NY[:, draft]) for name, side_NY in curves.items()
            }
    return found


def plot(rows: Sequence[Row], path: str) -> None:
    """Accepted length by domain, acceptance by position, and what thresholds do. ValueError where matplotlib is missing
    or the file cannot be written."""
    figure = plotting().Figure(figsize=(10, 8), layout="constrained")
    length, position, share, tokens = figure.subplots(2, 2).flatten()
    drafted = [row for row in rows if row["drafter"] != PLAIN]
    domains, names = (list(dict.fromkeys(row[key] for row in drafted)) for key in ("domain", "drafter"))
    for row in drafted:
        colour, style = f"C{names.index(row['drafter'])}", STYLES[domains.index(row["domain"]) % len(STYLES)]
        label = f"{row['drafter']}, {row['domain']}"
        place = domains.index(row["domain"]) + 0.8 * names.index(row["drafter"]) / len(names)
        length.bar(place, row["accepted_length"] or 0, 0.8 / len(names), align="edge", color=colour)
        for panel, points in _lines(row, position, share, tokens):
            panel.plot([x for x, _ in points], [y for _, y in points], style, color=colour, label=label)
    length.set(ylabel="accepted length, bonus included", xticks=[i + 0.4 for i in range(len(domains))])
    length.set_xticklabels(domains)
    most = max((len(row["conditional"]) for row in drafted), default=0)
    position.set(xticks=range(1, most + 1), xlabel="draft", ylabel="accepted if all before are", ylim=(0, 1))
    share.set(xlabel="threshold of confidence", ylabel="accepted share of verified drafts", ylim=(0, 1))
    tokens.set(xlabel="threshold of confidence", ylabel="tokens a step")
    figure.legend(*position.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    save_figure(figure, path)


def _lines(row: Mapping[str, Any], position: Any, share: Any, tokens: Any) -> list[tuple[Any, list[tuple[float, Any]]]]:
    """Each panel with its points of one row, those without a number left out."""
    points = [
        (position, [(draft + 1.0, value) for draft, value in enumerate(row["conditional"])]),
        (share, [(each["threshold"], each["accepted_share"]) for each in row["sweep"]]),
        (tokens, [(each["threshold"], each["tokens_per_step"]) for each in row["sweep"]]),
    ]
    return [(panel, [(x, y) for x, y in each if y is not None]) for panel, each in points]
