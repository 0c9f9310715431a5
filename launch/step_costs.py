"""The time of a step by its rows, measured on the engine's own caches before the first request comes."""

import time

import torch

from ..comm.agreement import agree
from ..layouts.rows import RequestRows
from ..models.dspark.costs import CostTable, cost_sizes, measure_costs
from ..models.dspark.proposer import Room
from ..models.dspark.step import Decoder, prepare, speculative_step
from ..models.request import RequestState, SamplingParams
from ..parallel.ownership import request_owner


def step_costs(decoder: Decoder, requests: int, slots_per_rank: int, repeats: int = 5) -> CostTable:
    """World rank 0's table of whole speculative steps, drafter included, of 1 to requests * (1 + gamma) rows of each
    group. All ranks call it, while no request slot is taken; the caches are as free afterwards as before.

    Requests stand behind a whole window where max_context has room for it; as many as the caches hold of them, at most
    `requests`, and as few as hold the rows at 1 + gamma each. ValueError where max_context is less than a block.
    """
    groups, caches, wide = decoder.model.groups, decoder.caches, 1 + decoder.gamma
    length = min(decoder.model.config.sliding_window, caches.shape.max_context - wide - 1)
    if length < 1:
        raise ValueError(
            f"max_context is {caches.shape.max_context}, allowed: {wide + 2} or more, to time steps of {wide} rows"
        )
    needed = caches.pages_needed(length + wide + 1)
    fit = min([caches.pages[name].count // pages for name, pages in needed.items() if pages])
    most = max(1, min(requests, fit))

    def run(rows: int) -> float:
        return _seconds(decoder, rows, most, length, slots_per_rank)

    own = measure_costs(run, cost_sizes(most * wide), repeats).encode()
    return CostTable.decode(agree(own, groups, length=len(own), stage="step costs")[0])


@torch.inference_mode()
def _seconds(decoder: Decoder, rows: int, requests: int, length: int, slots_per_rank: int) -> float:
    tp, caches = decoder.model.groups.tp.size, decoder.caches
    count = min(rows, requests)
    widths = [rows // count + (number < rows % count) for number in range(count)]
    # One request of each rank after the other, as seats are given.
    slots = [(number % tp) * slots_per_rank + number // tp for number in range(count)]
    states = [_state(slot, length, decoder.gamma, request_owner(slot, tp, slots_per_rank)) for slot in slots]
    for state in states:
        caches.admit(state.slot, state.limit)
        caches.map_resident(state.slot, length)
    picked = [prepare(state, 0, width) for state, width in zip(states, widths, strict=True)]
    blocks = [sum(state.owner == tp_rank for state in states) for tp_rank in range(tp)]
    begin = time.perf_counter()
    speculative_step(_present(picked), states, decoder, Room(tuple(blocks), max(blocks)))
    seconds = time.perf_counter() - begin
    for state in states:
        caches.release(state.slot)
    return seconds


def _state(slot: int, length: int, gamma: int, owner: int) -> RequestState:
    params = SamplingParams(max_new_tokens=gamma + 2)
    state = RequestState(prompt=[0] * length, params=params, slot=slot, owner=owner, computed=length)
    state.tokens.append(0)
    state.drafts = (0,) * gamma
    return state


def _present(rows: list[RequestRows | None]) -> list[RequestRows]:
    return [each for each in rows if each is not None]
