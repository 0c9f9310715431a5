"""What a run with drafting tells beside the rest: for --json, and as tables."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from .compare_runs import Comparison
from .drafting import Drafting
from .output import two_columns

COUNTED = ("tokens_per_step", "acceptance", "drafts")
"""What --json passes on of the engine's metrics where it drafts."""


def drafting_json(drafting: Drafting) -> dict[str, Any]:
    """How was drafted."""
    names = ("speculative", "gamma", "verify", "temperatures")
    return {**{name: getattr(drafting, name) for name in names}, "point_drafts": drafting.point}


def draft_figures(metrics: Mapping[str, Any], comparison: Comparison | None) -> dict[str, Any]:
    """Metrics of a run that drafted; speedup and comparison only where it was compared."""
    figures = {name: metrics[name] for name in COUNTED}
    if comparison is not None:
        figures |= {"speedup": comparison.speedup, "comparison": comparison.report()}
    return figures


def draft_tables(drafting: Drafting, metrics: Mapping[str, Any], comparison: Comparison | None) -> list[Table]:
    """The drafts, their acceptance by position, and where they were compared the rounds."""
    counts = metrics["drafts"]
    rows = {
        "tokens per step": _number(metrics["tokens_per_step"], "of a decoding request, the target's own included"),
        "drafts proposed": f"{counts['proposed']:,}",
        "drafts verified": f"{counts['verified']:,}",
        "drafts accepted": f"{counts['accepted']:,}",
        "rows wasted": f"{counts['wasted_rows']:,}",
        "draft time": f"{counts['draft_seconds']:.3f} s",
        "verify time": f"{counts['verify_seconds']:.3f} s",
    }
    if comparison is not None:
        rows["speed-up"] = _number(comparison.speedup, f"median of {len(comparison.rounds)} rounds")
        rows["same ids as without"] = "; ".join(map(str, comparison.divergences)) or "yes"
    kind = "point drafts" if drafting.point else "drafts"
    title = f"drafting: {drafting.speculative}, {drafting.gamma} {kind}, verify {drafting.verify}"
    return [two_columns(title, rows), acceptance_table(metrics["acceptance"])]


def acceptance_table(acceptance: Mapping[str, Sequence[float | None]]) -> Table:
    """Shares of accepted drafts by position in their block."""
    count = len(acceptance["conditional"])
    title = "acceptance by position of the draft"
    table = Table("", *map(str, range(1, count + 1)), title=title, title_justify="left")
    for name, what in (("conditional", "if all before it are"), ("cumulative", "with all before it")):
        shares = ["-" if share is None else f"{share:.3f}" for share in acceptance[name]]
        table.add_row(f"{name}, {what}", *shares)
    return table


def _number(value: float | None, what: str) -> str:
    return "none" if value is None else f"{value:.2f} ({what})"
