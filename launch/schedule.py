"""Which rows a step takes: every decoding request's, and prompts up to a budget that they share fairly."""

from collections.abc import Sequence

from ..layouts.rows import RequestRows
from ..models.dspark.step import prepare
from ..models.request import RequestState


def fair_shares(wanted: Sequence[int], budget: int) -> list[int]:
    """Shares of a budget, none above what is wanted: the smallest wish first, each at most an equal part of what is
    left, rounded up. So a short prompt does not wait behind a long one, and no part of the budget is lost."""
    shares = [0] * len(wanted)
    for place, index in enumerate(sorted(range(len(wanted)), key=lambda i: wanted[i])):
        shares[index] = min(wanted[index], -(-budget // (len(wanted) - place)))
        budget -= shares[index]
    return shares


def prompt_shares(requests: Sequence[RequestState], budget: int) -> dict[int, int]:
    """Prompt rows of each slot that has some to run, of a budget for all."""
    prompts = [request for request in requests if request.in_prompt]
    shares = fair_shares([request.prefill_end - request.computed for request in prompts], budget)
    return {request.slot: rows for request, rows in zip(prompts, shares, strict=True)}


def pick_rows(
    requests: Sequence[RequestState], shares: dict[int, int], widths: dict[int, int]
) -> list[tuple[RequestState, RequestRows]]:
    """Requests of a group that have rows in its next step, in their order: by slot, prompt rows as `prompt_shares`
    gives them, and of the others one row or as many as widths has."""
    picked = [(r, prepare(r, shares.get(r.slot, 0), widths.get(r.slot, 1))) for r in requests]
    return [(request, rows) for request, rows in picked if rows is not None]
