"""The time of a step by its rows, measured on the engine's own caches before the first request comes."""

import time
from dataclasses import replace

import numpy as np
import torch

from ..comm.agreement import agree
from ..layouts.rows import RequestRows
from ..models.dspark.costs import CostTable, cost_sizes, measure_costs
from ..models.dspark.proposer import Room
from ..models.dspark.schedule import Verification
from ..models.dspark.step import Decoder, prepare, speculative_step
from ..models.request import RequestState, SamplingParams
from ..parallel.ownership import first_slots, request_owner

MOST_RESIDENT = 1024
"""Positions before the rows that are timed: a longer context takes longer, but for every number of rows alike."""


def policy_costs(verify: Verification, decoder: Decoder, requests: int, slots_per_rank: int) -> CostTable | None:
    """The cost table that a policy needs, measured by `step_costs`; None where it needs none."""
    if not verify.uses_costs:
        return None
    return step_costs(replace(decoder, judge=None), requests, slots_per_rank)


def step_costs(decoder: Decoder, requests: int, slots_per_rank: int, repeats: int = 5) -> CostTable:
    """World rank 0's table of whole speculative steps, drafter included, of 1 to requests * (1 + gamma) rows of each
    group. All ranks call it, while no request slot is taken; the caches are as free afterwards as before.

    Requests stand in the middle of max_context, behind 1,024 positions at most; as many as the caches hold of them, at
    most `requests`, and as few as hold the rows at 1 + gamma each. ValueError where max_context is less than a block.
    """
    groups, caches, wide = decoder.model.groups, decoder.caches, 1 + decoder.gamma
    length = min(MOST_RESIDENT, max(1, caches.shape.max_context // 2), caches.shape.max_context - wide - 1)
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
    slots = first_slots(count, tp, slots_per_rank)
    vocab = decoder.model.config.vocab_size
    states = [_state(slot, length, decoder.gamma, request_owner(slot, tp, slots_per_rank), vocab) for slot in slots]
    for state in states:
        caches.admit(state.slot, state.limit)
        caches.map_resident(state.slot, length)
    picked = [prepare(state, 0, width) for state, width in zip(states, widths, strict=True)]
    blocks = [sum(state.owner == tp_rank for state in states) for tp_rank in range(tp)]
    seconds = 0.0
    # The second of two steps, as one of a run: the first of a new size finds nothing in the processor's caches.
    for _ in range(2):
        begin = time.perf_counter()
        speculative_step(_present(picked), states, decoder, Room(tuple(blocks), max(blocks)))
        seconds = time.perf_counter() - begin
    for state in states:
        caches.release(state.slot)
    return seconds


def _state(slot: int, length: int, gamma: int, owner: int, vocab: int) -> RequestState:
    """Its rows have tokens of their own: equal ones would all go to the same experts, which costs less."""
    tokens = np.random.Generator(np.random.Philox(key=slot)).integers(0, vocab, length + 1 + gamma).tolist()
    params = SamplingParams(max_new_tokens=gamma + 2)
    state = RequestState(prompt=tokens[:length], params=params, slot=slot, owner=owner, computed=length)
    state.tokens.append(tokens[length])
    state.drafts = tuple(tokens[length + 1 :])
    return state


def _present(rows: list[RequestRows | None]) -> list[RequestRows]:
    return [each for each in rows if each is not None]
