"""World rank 0's book: who waits, who sits where, and which pages are promised to whom."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping

from ..layouts.pages import COMPRESSED_TOKENS
from ..parallel.ownership import request_owner
from ..parallel.topology import Topology
from .requests import Request

REMEMBERED = 4096
"""First blocks of prompts whose group is remembered."""

Seat = tuple[int, int]
"""(dp group, request slot)."""


class Seats:
    """Requests in order of arrival, and the seats of a world of topology.dp groups.

    requests: seats of a group that may be taken at once. pages: what a group's pools hold, by family; needed tells
    how much of it a request of so many positions keeps.
    """

    def __init__(
        self,
        topology: Topology,
        slots_per_rank: int,
        requests: int,
        pages: Mapping[str, int],
        needed: Callable[[int], Mapping[str, int]],
    ) -> None:
        self._topology, self._slots_per_rank, self._requests = topology, slots_per_rank, requests
        self._pages, self._needed = pages, needed
        self._waiting: deque[Request] = deque()
        self._taken: list[dict[int, Request]] = [{} for _ in range(topology.dp)]
        self._promised = [dict.fromkeys(pages, 0) for _ in range(topology.dp)]
        self._generation: dict[Seat, int] = {}
        self._last_group: OrderedDict[tuple[int, ...], int] = OrderedDict()

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def check_fits(self, limit: int) -> None:
        """ValueError where a request of so many positions is more than a group's pools hold, with the numbers."""
        short = {f: f"needs {n}, has {self._pages[f]}" for f, n in self._needed(limit).items() if n > self._pages[f]}
        if short:
            raise ValueError(f"{limit} positions are more than the caches of a group hold: pages of {short}")

    def queue(self, request: Request) -> None:
        """Let a request wait for a seat."""
        self._waiting.append(request)

    def seat(self) -> list[Request]:
        """Give seats to those who wait, first come first served -> the requests that got one, seat entered."""
        seated = []
        while self._waiting:
            found = self._best(self._waiting[0])
            if found is None:
                break
            request = self._waiting.popleft()
            request.dp_rank, request.slot = found
            request.generation = self._generation[found] = self._generation.get(found, 0) + 1
            self._taken[request.dp_rank][request.slot] = request
            self._promise(request, 1)
            self._remember(request)
            seated.append(request)
        return seated

    def leave(self, request: Request) -> None:
        """The request's seat and pages are free again."""
        del self._taken[request.dp_rank][request.slot]
        self._promise(request, -1)

    def drop_waiting(self, request_ids: Iterable[int]) -> set[int]:
        """Forget those of these requests that still wait -> their numbers."""
        wanted = set(request_ids)
        found = {request.request_id for request in self._waiting if request.request_id in wanted}
        self._waiting = deque(request for request in self._waiting if request.request_id not in found)
        return found

    def clear(self) -> None:
        """Forget all who wait."""
        self._waiting.clear()

    def _promise(self, request: Request, sign: int) -> None:
        promised = self._promised[request.dp_rank]
        for family, count in self._needed(request.limit).items():
            promised[family] += sign * count

    def _best(self, request: Request) -> Seat | None:
        """The least loaded group with room, then the one that knows the prompt's start, then the lowest; in it the
        least loaded tp_rank, then the lowest slot. None where no group has room."""
        needed, known = self._needed(request.limit), self._last_group.get(_start(request), -1)
        rooms = [
            (len(taken), dp_rank != known, dp_rank)
            for dp_rank, taken in enumerate(self._taken)
            if len(taken) < self._requests
            and all(self._promised[dp_rank][f] + n <= self._pages[f] for f, n in needed.items())
        ]
        if not rooms:
            return None
        dp_rank = min(rooms)[2]
        load = [0] * self._topology.tp
        for slot in self._taken[dp_rank]:
            load[self._owner(slot)] += 1
        slots = range(self._topology.tp * self._slots_per_rank)
        free = [(load[self._owner(slot)], slot) for slot in slots if slot not in self._taken[dp_rank]]
        return dp_rank, min(free)[1]

    def _owner(self, slot: int) -> int:
        return request_owner(slot, self._topology.tp, self._slots_per_rank)

    def _remember(self, request: Request) -> None:
        if len(request.prompt) >= COMPRESSED_TOKENS:
            self._last_group[_start(request)] = request.dp_rank
            self._last_group.move_to_end(_start(request))
            if len(self._last_group) > REMEMBERED:
                self._last_group.popitem(last=False)


def _start(request: Request) -> tuple[int, ...]:
    return tuple(request.prompt[:COMPRESSED_TOKENS])
