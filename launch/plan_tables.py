"""A plan as tables for people."""

from typing import Any

from rich.table import Table
from rich.text import Text


def tables(plan: dict[str, Any]) -> list[Table]:
    """All tables of a plan, as `make_plan` gives it."""
    return [
        _head(plan),
        _memory(plan),
        _pools(plan),
        _stages(plan),
        _exchanges(plan),
        _times(plan),
        _projection(plan),
        _fits(plan),
        _topologies(plan),
        _worlds(plan),
    ]


def _table(title: str, *headings: str) -> Table:
    table = Table(title=_line(title), title_justify="left")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left")
    return table


def _line(text: str) -> Text:
    """A title or caption that is not broken at the table's width."""
    return Text(text, no_wrap=True, overflow="ignore")


def _size(size: float) -> str:
    """Bytes in the unit that fits them."""
    for unit, number in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= number:
            return f"{size / number:,.2f} {unit}"
    return f"{size:,.0f} B"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f}"


def _head(plan: dict[str, Any]) -> Table:
    table = Table(title=_line(f"plan of {plan['model']}"), title_justify="left", show_header=False)
    t, s, d = plan["topology"], plan["settings"], plan["device"]
    table.add_row("ranks", f"{t['world']}: tp {t['tp']}, ep {t['ep']}, {t['dp']} tensor groups")
    table.add_row("numerics", plan["numerics"])
    table.add_row("drafter", f"{plan['speculative']}, {s['gamma']} drafts" if s["gamma"] else "none")
    each = f"{s['batch']} requests x {s['verify_rows']} rows, {s['prefill_rows']} prefill rows"
    table.add_row("of a tensor group", f"{each}, {s['prefix_points']} prefix points")
    cards = -(-s["batch"] // t["tp"])
    table.add_row("of a rank", f"{cards} requests, {cards * s['verify_rows']} rows of theirs")
    table.add_row("context", f"{s['context']:,} positions, pages of {s['block_size']}")
    rates = f"{d['memory_gbs']:g} GB/s memory, {d['link_gbs']:g} GB/s link, {d['tflops']:g} TFLOPS"
    table.add_row("device", f"{d['gib']:g} GiB, {rates}, {d['int8_tops']:g} INT8 TOPS, {d['call_us']:g} us a call")
    return table


def _memory(plan: dict[str, Any]) -> Table:
    table = _table("memory", "part", "per rank", "of all ranks")
    mine, total, world = plan["per_rank"], plan["total"], plan["topology"]["world"]
    for part, size in mine["weights_by_part"].items():
        table.add_row(f"  {part}", _size(size), _size(size * world))
    table.add_row("weights", _size(mine["weights"]), _size(total["weights"]))
    table.add_row("pools", _size(sum(mine["pools"].values())), _size(sum(total["pools"].values())))
    table.add_row("buffers", _size(mine["buffers"]), _size(total["buffers"]))
    table.add_row("windows", _size(mine["windows"]), _size(total["windows"]))
    table.add_section()
    table.add_row("peak", _size(mine["peak"]), _size(total["peak"]))
    if mine["peak"] > plan["device"]["gib"] * (1 << 30):
        left = plan["room_for_caches"]
        told = f"{_size(left)} are left for the pools" if left > 0 else "nothing is left for the pools"
        table.caption = _line(f"more than the {plan['device']['gib']:g} GiB of a device: {told} (--cache-gib)")
    return table


def _pools(plan: dict[str, Any]) -> Table:
    table = _table("pools", "pool", "bytes per rank", "size")
    for name, size in plan["per_rank"]["pools"].items():
        table.add_row(name, f"{size:,}", _size(size))
    return table


def _stages(plan: dict[str, Any]) -> Table:
    table = _table("buffers of the largest step, and shared windows", "stage", "bytes per rank", "size")
    for name, size in plan["per_rank"]["buffers_by_stage"].items():
        table.add_row(name, f"{size:,}", _size(size))
    table.add_section()
    for name, window in plan["windows"].items():
        table.add_row(f"window of {name}", f"{window['per_rank']:,}", _size(window["per_rank"]))
    worst = plan["worst_case"]
    table.caption = _line(
        f"experts at the worst: {worst['rows']:,} rows of the EP block with all routes to one rank are "
        f"{worst['routes']:,} routes, {_size(worst['dispatch_bytes'])} there, {_size(worst['combine_bytes'])} back"
    )
    return table


def _exchanges(plan: dict[str, Any]) -> Table:
    """Calls and bytes of every sort in each kind of step, greedy requests."""
    steps = plan["steps"]
    headings = [f"{name}: calls, sent" for name in steps]
    table = _table("exchanges of the busiest rank in a step", "layer kind", "group", "stage", "call", *headings)
    key = ("kind", "group", "stage", "op")
    sorts = dict.fromkeys(tuple(e[k] for k in key) for step in steps.values() for e in step["ids"]["exchanges"])
    found = [{tuple(e[k] for k in key): e for e in step["ids"]["exchanges"]} for step in steps.values()]
    for each in sorts:
        cells = [_calls(step[each]["calls"], step[each]["bytes"]) if each in step else "" for step in found]
        table.add_row(*each, *cells)
    table.add_section()
    sampled = [_calls(step["logits"]["calls"], step["logits"]["bytes"]) for step in steps.values()]
    table.add_row("all", "", "", "", *(_calls(step["ids"]["calls"], step["ids"]["bytes"]) for step in steps.values()))
    table.add_row("all, sampled", "", "", "", *sampled)
    for what, told in (("group", "rows of the group"), ("band", "rows of a band"), ("asked", "rows asked")):
        table.add_row(told, "", "", "", *(f"{step['rows'][what]:,}" for step in steps.values()))
    table.add_row("projection by", "", "", "", *(step["projection"] for step in steps.values()))
    return table


def _calls(calls: int, size: int) -> str:
    return f"{calls:,}, {_size(size)}"


def _times(plan: dict[str, Any]) -> Table:
    headings = ("step", "layers", "memory", "arithmetic", "link", "in all", "bound by")
    context = plan["settings"]["context"]
    table = _table(f"time of a step at {context:,} positions, ms, estimated", *headings)
    for name, step in plan["steps"].items():
        found = step["estimate"]
        for kind, each in found["kinds"].items():
            times = [_ms(each[part]) for part in ("memory", "arithmetic", "link", "total")]
            table.add_row(name, kind, *times, each["bound"])
        table.add_row(name, "all", "", "", "", _ms(found["seconds"]), found["bound"])
        table.add_section()
    return table


def _projection(plan: dict[str, Any]) -> Table:
    found = plan["projection"]
    headings = ("rows of a band", "as activations", "as weights", "choice")
    table = _table(f"output projection, bytes that leave a rank in a layer, --projection {found['mode']}", *headings)
    for row in found["rows"]:
        sizes = (_size(row["activation_bytes"]), _size(row["weight_bytes"]))
        table.add_row(f"{row['rows']:,}", *sizes, row["choice"])
    if found["break_even"] is not None:
        table.caption = _line(f"weights cost less from {found['break_even']:,} rows of a band on")
    return table


def _fits(plan: dict[str, Any]) -> Table:
    headings = ("context", "requests of a group", "of all groups", "decode step, ms", "bound by")
    table = _table(f"requests that fit a device of {plan['device']['gib']:g} GiB", *headings)
    for row in plan["fits"]:
        counts = (f"{row['requests_per_group']:,}", f"{row['requests']:,}")
        table.add_row(f"{row['context']:,}", *counts, _ms(row["decode_seconds"]), row["bound"])
    return table


def _topologies(plan: dict[str, Any]) -> Table:
    sizes = ("weights", "pools", "buffers", "peak")
    headings = ("tp, ep", "groups", *sizes, "requests that fit", "sent", "decode, ms", "rows/s a rank", "bound by")
    table = _table("one EP block at other topologies, per rank, the same requests per group", *headings)
    for row in plan["topologies"]:
        memory = [_size(row[name]) for name in sizes]
        rate = f"{row['rows_per_second_per_rank']:,.0f}"
        table.add_row(
            f"{row['tp']}, {row['ep']}", f"{row['groups']}", *memory, f"{row['fitting_requests_per_group']:,}",
            _size(row["decode_leaves"]), _ms(row["decode_seconds"]), rate, row["bound"],
        )  # fmt: skip
    return table


def _worlds(plan: dict[str, Any]) -> Table:
    t = plan["topology"]
    headings = ("ranks", "EP blocks", "tensor groups", "requests", "agreement, sent", "agreement, ms")
    table = _table(f"more ranks at tp {t['tp']}, ep {t['ep']}: whole EP blocks", *headings)
    for row in plan["worlds"]:
        counts = [f"{row[name]:,}" for name in ("ranks", "ep_blocks", "groups", "requests")]
        table.add_row(*counts, _size(row["agreement_bytes"]), _ms(row["agreement_seconds"]))
    return table
