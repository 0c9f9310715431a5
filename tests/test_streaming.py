"""Asynchronous iteration: the same ids as without it, early leavers, refusals, failures and ends."""

import asyncio
import gc
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest
from episodes import make_model, single_model
from rank_pool import RankPools
from test_engine import MODE, run, traffic

from meshspark.benchmarks.oracle import OracleProposer
from meshspark.launch.engine import Engine
from meshspark.launch.requests import Event, RequestFailed
from meshspark.launch.streaming import Streams
from meshspark.models.request import SamplingParams
from meshspark.parallel.errors import RankDied
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

PATIENCE = 60.0
FOREVER = SamplingParams(10**6)


class Scripted:
    """Stands in for an engine: every step gives each request one token, its own number."""

    is_front = True

    def __init__(self, step_seconds: float = 0.0, fail_at: int | None = None) -> None:
        self.step_seconds, self.fail_at = step_seconds, fail_at
        self.left: dict[int, int] = {}
        self.cancelled: list[int] = []
        self.spoiled: set[int] = set()
        self.steps, self.number, self.inside, self.closed = 0, 0, False, False

    @property
    def active(self) -> bool:
        return bool(self.left)

    def add_request(self, prompt_ids: list[int], params: SamplingParams) -> int:
        assert not self.inside, "a request came in the middle of a step"
        if not prompt_ids:
            raise ValueError("prompt has 0 ids")
        self.number += 1
        self.left[self.number] = params.max_new_tokens
        return self.number

    def cancel(self, request_id: int) -> None:
        assert not self.inside, "a cancellation came in the middle of a step"
        self.cancelled.append(request_id)
        self.left.pop(request_id)

    def step(self) -> list[Event]:
        self.inside, self.steps = True, self.steps + 1
        time.sleep(self.step_seconds)
        self.inside = False
        if self.steps == self.fail_at:
            raise RankDied("rank 3 has died", group="world", ranks=(3,))
        events = []
        for number in list(self.left):
            self.left[number] -= 1
            spoiled, last = number in self.spoiled, self.left[number] == 0
            reason = "error" if spoiled else "length" if last else None
            events.append(Event(number, () if spoiled else (number,), reason, 2))
            if reason is not None:
                del self.left[number]
        return events

    def close(self) -> None:
        assert not self.inside and not self.closed
        self.closed = True


def go(work: Coroutine) -> Any:
    return asyncio.run(asyncio.wait_for(work, PATIENCE))


async def collect(streams: Streams, prompt: list[int], params: SamplingParams) -> list[int]:
    return [token async for token in streams.generate(prompt, params)]


async def ids_of(engine: Engine, requests: list, apart: float = 0.0) -> list[list[int]]:
    """All requests at once, or one after the other's beginning, by iteration."""
    async with Streams(engine) as streams:
        tasks = []
        for prompt, params in requests:
            tasks.append(asyncio.create_task(collect(streams, prompt, params)))
            await asyncio.sleep(apart)
        return await asyncio.gather(*tasks)


def engine_of(groups: Groups) -> Engine:
    model = single_model("tiny", MODE) if groups.topology.world == 1 else make_model(groups, "tiny", MODE)
    return Engine(model, requests=4, max_context=128)


@pytest.mark.parametrize("apart", [0.0, 0.02])
def test_iteration_gives_what_the_engine_gives(apart: float) -> None:
    requests = traffic(7)
    want = [ids for ids, _ in run(engine_of(Groups.single()), requests)]
    engine = engine_of(Groups.single())
    assert go(ids_of(engine, requests, apart)) == want
    assert engine.closed and not engine.requests


def test_an_early_leaver_is_cancelled_and_the_others_keep_their_ids() -> None:
    """By break, by the end of its task, and before its first step."""
    requests = traffic(3)
    want = [ids for ids, _ in run(engine_of(Groups.single()), requests)]

    async def leave(streams: Streams, engine: Engine) -> None:
        long = SamplingParams(100)
        async for _ in streams.generate([5, 6, 7], long):
            break
        task = asyncio.create_task(collect(streams, [8, 9], long))
        await asyncio.sleep(0.05)
        task.cancel()
        at_once = streams.generate([3], long)
        first = asyncio.create_task(anext(at_once))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(task, first, return_exceptions=True)
        await at_once.aclose()

    async def work() -> list[list[int]]:
        engine = engine_of(Groups.single())
        async with Streams(engine) as streams:
            tasks = [asyncio.create_task(collect(streams, *request)) for request in requests]
            await leave(streams, engine)
            found = await asyncio.gather(*tasks)
            # The iterator that was left by `break` is closed when it is collected.
            gc.collect()
            while engine.active:
                await asyncio.sleep(0.01)
            assert not engine.requests
        return found

    assert go(work()) == want


def test_leaving_tells_the_engine_once_and_only_if_it_does_not_know() -> None:
    async def work() -> None:
        engine = Scripted()
        async with Streams(engine) as streams:
            assert await collect(streams, [1], SamplingParams(3)) == [1, 1, 1]
            stream = streams.generate([1], FOREVER)
            assert await anext(stream) == 2
            await stream.aclose()
            await stream.aclose()
            assert await collect(streams, [1], SamplingParams(1)) == [3]
            assert engine.cancelled == [2] and not engine.active

    go(work())


def test_the_event_loop_goes_on_while_a_step_runs() -> None:
    async def work() -> int:
        ticks = 0
        async with Streams(Scripted(step_seconds=0.2)) as streams:
            task = asyncio.create_task(collect(streams, [1], SamplingParams(3)))
            while not task.done():
                await asyncio.sleep(0.005)
                ticks += 1
        return ticks

    assert go(work()) > 10


def test_nothing_is_stepped_while_nothing_is_active() -> None:
    async def work() -> None:
        engine = Scripted()
        async with Streams(engine) as streams:
            await collect(streams, [1], SamplingParams(2))
            await asyncio.sleep(0.1)
            assert engine.steps == 2
            await collect(streams, [1], SamplingParams(2))
            assert engine.steps == 4

    go(work())


def test_what_the_engine_refuses_reaches_its_caller_alone() -> None:
    async def work() -> None:
        engine = engine_of(Groups.single())
        async with Streams(engine) as streams:
            other = asyncio.create_task(collect(streams, [5, 6], SamplingParams(6)))
            with pytest.raises(ValueError, match="prompt has 0 ids"):
                await collect(streams, [], SamplingParams(3))
            with pytest.raises(ValueError, match="allowed: max_context 128"):
                await collect(streams, [5], SamplingParams(500))
            assert len(await other) == 6

    go(work())


def test_a_failure_of_the_engine_reaches_everybody_now_and_later() -> None:
    async def work() -> None:
        engine = Scripted(step_seconds=0.05, fail_at=3)
        streams = Streams(engine)
        tasks = [asyncio.create_task(collect(streams, [1], FOREVER)) for _ in range(3)]
        await asyncio.sleep(0.12)
        tasks.append(asyncio.create_task(collect(streams, [1], FOREVER)))
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(one) for one in found] == [RankDied] * 4 and found[0].ranks == (3,)
        with pytest.raises(RankDied):
            await collect(streams, [1], FOREVER)
        await streams.close()
        assert not engine.closed, "an engine that failed has nobody to close"

    go(work())


def test_a_request_that_ends_as_an_error_says_where() -> None:
    async def work() -> None:
        engine = Scripted(step_seconds=0.01)
        engine.spoiled = {1, 2}
        async with Streams(engine) as streams:
            with pytest.raises(RequestFailed, match="request 1 on rank 2 ended as error"):
                await collect(streams, [1], FOREVER)
            assert [event.finish_reason async for event in streams.events([1], FOREVER)] == ["error"]
            assert await collect(streams, [1], SamplingParams(2)) == [3, 3]
        assert not engine.cancelled

    go(work())


def drafting_engine(requests: list) -> tuple[Engine, list[list[int]]]:
    """An engine whose drafts are all right, 4 a step, and what plain decoding gives for the requests, one seat each."""
    want = [ids for ids, _ in run(engine_of(Groups.single()), requests)]
    known = {slot: [*prompt, *ids] for slot, ((prompt, _), ids) in enumerate(zip(requests, want, strict=True))}
    model = single_model("tiny", MODE)
    oracle = OracleProposer(4, known, lambda *_: True, model.config.vocab_size)
    return Engine(model, requests=4, max_context=128, proposer=oracle), want


BLOCKS = [([5, 6, 7], SamplingParams(23)), ([9, 4], SamplingParams(16)), ([30] * 9, SamplingParams(40))]


def test_tokens_that_come_together_are_given_out_one_by_one() -> None:
    async def work(engine: Engine, want: list[list[int]]) -> None:
        async with Streams(engine) as streams:
            tasks = [asyncio.create_task(collect(streams, *request)) for request in BLOCKS]
            assert await asyncio.gather(*tasks) == want
            events = [event async for event in streams.events(*BLOCKS[0])]
        assert [token for event in events for token in event.token_ids] == want[0]
        assert max(len(event.token_ids) for event in events) == 5 and len(events) < 10
        between = engine.metrics()["time_between_tokens"]
        assert between["count"] == sum(len(ids) - 1 for ids in (*want, want[0]))

    engine, want = drafting_engine(BLOCKS)
    go(work(engine, want))


def test_a_consumer_may_leave_in_the_middle_of_a_block() -> None:
    """Its request ends, the tokens of the block that it had not taken go nowhere, and the others keep theirs."""

    async def work(engine: Engine, want: list[list[int]]) -> None:
        step, ends = engine.step, {}

        def noted() -> list[Event]:
            events = step()
            ends.update({event.request_id: event.finish_reason for event in events if event.finish_reason})
            return events

        engine.step = noted  # type: ignore[method-assign]
        async with Streams(engine) as streams:
            tasks = [asyncio.create_task(collect(streams, *request)) for request in BLOCKS[:2]]
            # Both have asked before the third does, so that each has the seat that its drafts are known for.
            await asyncio.sleep(0)
            stream = streams.generate(*BLOCKS[2])
            # The first comes alone, with its prompt; then two of the five of a block.
            assert [await anext(stream) for _ in range(3)] == want[2][:3]
            await stream.aclose()
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            assert await asyncio.gather(*tasks) == want[:2]
            while engine.active:
                await asyncio.sleep(0.01)
            assert not engine.requests and ends == {0: "length", 1: "length", 2: "cancelled"}
            engine.caches.check_integrity()

    go(work(*drafting_engine(BLOCKS)))


def test_tokens_before_a_failure_in_the_same_step_are_given_out() -> None:
    async def work() -> None:
        engine = Scripted()
        taken: list[int] = []
        step = engine.step

        def several() -> list[Event]:
            return [replace(each, token_ids=(4, 5), finish_reason="error") for each in step()]

        engine.step = several  # type: ignore[method-assign]
        async with Streams(engine) as streams:
            with pytest.raises(RequestFailed, match="ended as error"):
                async for token in streams.generate([1], SamplingParams(1)):
                    taken.append(token)
        assert taken == [4, 5]

    go(work())


def test_closing_ends_consumers_and_later_ones_are_refused() -> None:
    async def work() -> None:
        engine = Scripted(step_seconds=0.02)
        streams = Streams(engine)
        tasks = [asyncio.create_task(collect(streams, [1], FOREVER)) for _ in range(2)]
        await asyncio.sleep(0.1)
        await streams.close()
        await streams.close()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(one) for one in found] == [RequestFailed] * 2 and "were closed" in str(found[0])
        assert engine.closed
        with pytest.raises(ValueError, match="these are closed"):
            await collect(streams, [1], FOREVER)

    go(work())


def test_streams_that_nobody_used_close_too() -> None:
    async def work() -> None:
        engine = Scripted()
        async with Streams(engine):
            pass
        assert engine.closed

    go(work())


def serve_or_iterate(groups: Groups) -> list[list[int]] | None:
    """Rank 0 iterates twice, idle in between; the others serve until it closes."""
    engine = engine_of(groups)
    if not engine.is_front:
        with pytest.raises(ValueError, match="is for world rank 0, this is rank"):
            Streams(engine)
        engine.serve()
        return None

    async def work() -> list[list[int]]:
        async with Streams(engine) as streams:
            first = [await collect(streams, *request) for request in traffic(1)]
            await asyncio.sleep(0.3)
            stream = streams.generate([4, 5], SamplingParams(100))
            await anext(stream)
            await stream.aclose()
            return first + await asyncio.gather(*(collect(streams, *request) for request in traffic(5)[1:]))

    return go(work())


def test_other_ranks_serve_until_the_streams_are_closed(ranks: RankPools) -> None:
    want = [ids for ids, _ in run(engine_of(Groups.single()), traffic(5))]
    assert ranks.run(Topology(2, 2, 2), "test_streaming:serve_or_iterate", 120) == [want, None]
