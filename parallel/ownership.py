"""Who owns what: slices of rows, requests, experts, vocabulary and output groups, and their inverse maps.

Pure arithmetic. Everything is contiguous: owner `part` of `parts` holds [part * n, (part + 1) * n). Experts,
vocabulary and output groups come in equal shares; bands of rows are padded to one length and may end early.
"""


def equal_slice(part: int, parts: int, total: int, what: str = "items") -> slice:
    """The share of owner `part` when `total` things are split equally; ValueError if they cannot be."""
    share = _share(parts, total, what)
    _check_index(part, parts, f"owner of {what}")
    return slice(part * share, (part + 1) * share)


def equal_owner(item: int, parts: int, total: int, what: str = "items") -> int:
    """Inverse of `equal_slice`."""
    share = _share(parts, total, what)
    _check_index(item, total, what)
    return item // share


def expert_slice(ep_rank: int, ep: int, n_routed_experts: int) -> slice:
    """Routed experts that an ep_rank holds."""
    return equal_slice(ep_rank, ep, n_routed_experts, "routed experts")


def expert_owner(expert: int, ep: int, n_routed_experts: int) -> int:
    """The ep_rank that holds an expert."""
    return equal_owner(expert, ep, n_routed_experts, "routed experts")


def vocab_slice(tp_rank: int, tp: int, vocab_size: int) -> slice:
    """Rows of the output head that a tp_rank holds."""
    return equal_slice(tp_rank, tp, vocab_size, "vocabulary rows")


def vocab_owner(token_id: int, tp: int, vocab_size: int) -> int:
    """The tp_rank that holds a token's row of the output head."""
    return equal_owner(token_id, tp, vocab_size, "vocabulary rows")


def output_group_slice(tp_rank: int, tp: int, o_groups: int) -> slice:
    """Groups of the output projection that a tp_rank holds."""
    return equal_slice(tp_rank, tp, o_groups, "output groups")


def output_group_owner(group: int, tp: int, o_groups: int) -> int:
    """The tp_rank that holds an output group."""
    return equal_owner(group, tp, o_groups, "output groups")


def request_slots(tp_rank: int, tp: int, slots_per_rank: int) -> slice:
    """Request slots of the tensor group that are pinned to a tp_rank."""
    return equal_slice(tp_rank, tp, tp * slots_per_rank, "request slots")


def first_slots(count: int, tp: int, slots_per_rank: int) -> list[int]:
    """The slots that so many requests get in a tensor group without any: one of each tp_rank in turn."""
    return [number % tp * slots_per_rank + number // tp for number in range(count)]


def request_owner(slot: int, tp: int, slots_per_rank: int) -> int:
    """The tp_rank to which a request slot of the tensor group is pinned."""
    return equal_owner(slot, tp, tp * slots_per_rank, "request slots")


def even_band(rows: int, tp: int) -> int:
    """Least band length that holds all rows of a tensor group: ceil(rows / tp)."""
    if rows < 0 or tp < 1:
        raise ValueError(f"rows is {rows} and tp is {tp}, allowed: rows from 0 and tp from 1")
    return -(-rows // tp)


def band_slice(tp_rank: int, tp: int, local_t: int) -> slice:
    """Group rows of a tp_rank's band, padding included: rank-major, bands of equal length `local_t`."""
    return equal_slice(tp_rank, tp, tp * local_t, "group rows") if local_t else slice(0, 0)


def band_owner(group_row: int, tp: int, local_t: int) -> tuple[int, int]:
    """(tp_rank, local row) of a group row."""
    tp_rank = equal_owner(group_row, tp, tp * local_t, "group rows")
    return tp_rank, group_row - tp_rank * local_t


def row_slice(tp_rank: int, tp: int, rows: int) -> slice:
    """The part of `rows` real rows that falls into a tp_rank's band of ceil(rows / tp); late bands may be short."""
    _check_index(tp_rank, tp, "owner of rows")
    length = even_band(rows, tp)
    return slice(min(tp_rank * length, rows), min((tp_rank + 1) * length, rows))


def row_owner(row: int, tp: int, rows: int) -> int:
    """Inverse of `row_slice`."""
    _check_index(row, rows, "rows")
    return row // even_band(rows, tp)


def _share(parts: int, total: int, what: str) -> int:
    if parts < 1 or total < 0 or total % parts:
        raise ValueError(f"{total} {what} cannot be split equally over {parts} owners")
    return total // parts


def _check_index(index: int, limit: int, what: str) -> None:
    if not 0 <= index < limit:
        raise ValueError(f"index into {what} is {index}, allowed: 0 to {limit - 1}")
