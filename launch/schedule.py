"""Which rows a step takes: every decoding request's, and prompts up to a budget that they share fairly."""

from collections.abc import Callable, Sequence

from ..layouts.rows import RequestRows
from .requests import Request


def fair_shares(wanted: Sequence[int], budget: int) -> list[int]:
    """Shares of a budget, none above what is wanted: the smallest wish first, each at most an equal part of what is
    left, rounded up. So a short prompt does not wait behind a long one, and no part of the budget is lost."""
    shares = [0] * len(wanted)
    for place, index in enumerate(sorted(range(len(wanted)), key=lambda i: wanted[i])):
        shares[index] = min(wanted[index], -(-budget // (len(wanted) - place)))
        budget -= shares[index]
    return shares


def pick_rows(requests: Sequence[Request], budget: int, owner: Callable[[int], int]) -> list[RequestRows]:
    """The rows of a step of one group, requests in their order; `budget` is of prompt rows, owner tells the tp_rank
    of a slot."""
    prompts = [request for request in requests if request.in_prompt]
    shares = fair_shares([request.waiting for request in prompts], budget)
    share = {request.request_id: rows for request, rows in zip(prompts, shares, strict=True)}
    picked = [r.next_rows(share.get(r.request_id, r.waiting), owner(r.slot)) for r in requests]
    return [rows for rows in picked if rows is not None]
