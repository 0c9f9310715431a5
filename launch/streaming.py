"""The engine for asyncio: each request is an asynchronous iterator, all of them share the engine's steps.

Steps run in one thread of their own, so that the event loop goes on while the mesh computes. The engine itself is
touched by nobody else meanwhile: requests and cancellations wait until the step in flight has ended.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field

from ..models.request import SamplingParams
from .engine import Engine
from .requests import Event, RequestFailed


@dataclass(eq=False)
class _Stream:
    """One consumer's request: its number once the engine has taken it, and its events or what ended them."""

    request_id: int | None = None
    events: asyncio.Queue[Event | Exception] = field(default_factory=asyncio.Queue)


@dataclass(frozen=True)
class _Wish:
    """Something to do between two steps, and who waits for it."""

    act: Callable[[], None]
    done: asyncio.Future[None] | None = None


class Streams:
    """Asynchronous iteration over an engine, on world rank 0; the other ranks run `engine.serve()`.

    Belongs to one event loop. While it is open, nobody else may call the engine's methods. `async with` closes it.
    ValueError on any other rank.
    """

    def __init__(self, engine: Engine) -> None:
        if not engine.is_front:
            raise ValueError(f"Streams is for world rank 0, this is rank {engine.groups.rank}, which runs serve()")
        self.engine = engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="meshspark-engine")
        self._streams: dict[int, _Stream] = {}
        self._wishes: deque[_Wish] = deque()
        self._news = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._closed = False

    async def __aenter__(self) -> "Streams":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncGenerator[int, None]:
        """Token ids as they come, without the end token; leaving the iterator early cancels the request. Where drafting
        gives several in one step, they come one after the other, and those that are not taken go nowhere.

        ValueError for what the engine refuses, RequestFailed for a request that ends as an error, with its number
        and rank, or whose streams are closed. A failure of the engine is raised to every consumer.
        """
        async with aclosing(self.events(prompt_ids, params)) as events:
            async for event in events:
                for token in event.token_ids:
                    yield token
                if event.finish_reason == "error":
                    where = f"request {event.request_id} on rank {event.rank}"
                    raise RequestFailed(f"{where} ended as error, for a row of logits is not finite")

    async def events(self, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncGenerator[Event, None]:
        """As `generate`, by events: the last one says why the request ended, "error" included."""
        stream = _Stream()
        try:
            await self._between_steps(lambda: self._add(stream, prompt_ids, params))
            while True:
                event = await stream.events.get()
                if isinstance(event, Exception):
                    raise event
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            self._leave(stream)

    async def close(self) -> None:
        """End the requests still running (RequestFailed to their consumers) and the other ranks' serve()."""
        if self._closed:
            return
        self._closed = True
        self._news.set()
        if self._pump is not None:
            await asyncio.wait({self._pump})
        self._end_all(RequestFailed("the request ended, for its streams were closed"))
        try:
            if self._failure is None:
                await asyncio.get_running_loop().run_in_executor(self._thread, self.engine.close)
        finally:
            self._thread.shutdown(wait=False)

    async def _between_steps(self, act: Callable[[], None]) -> None:
        """Have `act` done while no step is in flight; what it raises is raised here."""
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise ValueError("generate is for streams that are open, these are closed")
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._wish(_Wish(act, done))
        await done

    def _wish(self, wish: _Wish) -> None:
        self._wishes.append(wish)
        self._news.set()
        if self._pump is None:
            self._pump = asyncio.create_task(self._run(), name="meshspark-steps")

    def _add(self, stream: _Stream, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        stream.request_id = self.engine.add_request(prompt_ids, params)
        self._streams[stream.request_id] = stream

    def _leave(self, stream: _Stream) -> None:
        """The consumer has gone; the engine is told if it does not know that the request has ended."""
        number = stream.request_id
        if number is not None and self._streams.pop(number, None) is not None and not self._closed:
            self._wish(_Wish(lambda: self.engine.cancel(number)))

    async def _run(self) -> None:
        """Step while anything is active, and wait for news while nothing is."""
        loop = asyncio.get_running_loop()
        try:
            while not self._closed:
                self._news.clear()
                self._grant()
                if not self.engine.active:
                    await self._news.wait()
                    continue
                for event in await loop.run_in_executor(self._thread, self.engine.step):
                    self._deliver(event)
        except Exception as problem:
            self._failure = problem
            self._end_all(problem)
        except asyncio.CancelledError:
            self._failure = RequestFailed("the request ended with the event loop that ran its steps")
            self._end_all(self._failure)
            raise

    def _grant(self) -> None:
        while self._wishes:
            wish = self._wishes.popleft()
            if wish.done is None:
                wish.act()
            elif not wish.done.done():
                try:
                    wish.act()
                except Exception as problem:
                    wish.done.set_exception(problem)
                else:
                    wish.done.set_result(None)

    def _deliver(self, event: Event) -> None:
        stream = self._streams.get(event.request_id)
        if stream is not None:
            stream.events.put_nowait(event)
            if event.finish_reason is not None:
                del self._streams[event.request_id]

    def _end_all(self, problem: Exception) -> None:
        """Tell everybody who waits."""
        for stream in self._streams.values():
            stream.events.put_nowait(problem)
        self._streams.clear()
        for wish in self._wishes:
            if wish.done is not None and not wish.done.done():
                wish.done.set_exception(problem)
        self._wishes.clear()
