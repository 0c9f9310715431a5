"""Which prefixes of token sequences the caches still hold, and in which pages. No tensors.

A point is a prefix that ends on a multiple of 128 tokens. Its entries are the compressed pages of its last 128
tokens; its state is what a sequence that goes on from there reads besides: the pages of the window and of the
compressors. Many points are worth keeping for their entries alone, for all deeper ones need these; a sequence can
only start where there is state too.
"""

import hashlib
import heapq
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Pages = Mapping[str, tuple[int, ...]]
"""Pages by family."""

ROOT = b""
"""The key of the empty prefix."""


def point_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of the prefix `parent` followed by these tokens: equal where the tokens are, in practice only there."""
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()


def point_tokens(tokens: Sequence[int], number: int, span: int, ahead: int = 0) -> Sequence[int]:
    """What the key of a sequence's number-th point is made of beside its parent's.

    ahead: how many tokens behind a point its rows depend on too; they are part of its key and not of the next one's.
    """
    return tokens[number * span + ahead if number else 0 : (number + 1) * span + ahead]


def point_keys(tokens: Sequence[int], span: int, known: Sequence[bytes] = (), ahead: int = 0) -> list[bytes]:
    """Keys of all whole points of a sequence, in order; `known` are the first ones."""
    keys = list(known)
    for number in range(len(keys), max(0, len(tokens) - ahead) // span):
        keys.append(point_key(keys[-1] if keys else ROOT, point_tokens(tokens, number, span, ahead)))
    return keys


@dataclass
class Point:
    """One published prefix. state None: it can be passed through, not started from. used: when, in order of use."""

    key: bytes
    parent: bytes
    entries: Pages
    state: Pages | None = None
    children: int = 0
    used: int = 0


class PrefixIndex:
    """Published points by key, the longest unused going first.

    limit: points with state at most. drop(family, page) is called for each page that is given up.
    """

    def __init__(self, limit: int, drop: Callable[[str, int], None]) -> None:
        self.limit, self._drop = limit, drop
        self.points: dict[bytes, Point] = {}
        self._states: OrderedDict[bytes, None] = OrderedDict()
        self._leaves: list[tuple[int, bytes]] = []
        self._clock = 0

    def longest(self, keys: Sequence[bytes]) -> list[Point]:
        """The points of the longest published prefix that can be started from, [] where there is none."""
        chain: list[Point] = []
        for key in keys:
            point = self.points.get(key)
            if point is None:
                break
            chain.append(point)
        while chain and chain[-1].state is None:
            chain.pop()
        if chain:
            self._states.move_to_end(chain[-1].key)
            self._touch(chain[-1])
        return chain

    def publish(self, key: bytes, parent: bytes, entries: Pages) -> Point | None:
        """The point of this key; None if it is new, then it holds `entries` from now on. Its parent is published."""
        point = self.points.get(key)
        if point is not None:
            self._touch(point)
            return point
        assert parent == ROOT or parent in self.points, "a point is published after its parent"
        if parent != ROOT:
            self.points[parent].children += 1
        self.points[key] = Point(key, parent, entries)
        self._touch(self.points[key])
        return None

    def add_state(self, key: bytes, state: Pages) -> None:
        """Make a point one that can be started from; it holds the pages of `state` from now on."""
        assert self.points[key].state is None, "a point has one state"
        self.points[key].state = state
        self._states[key] = None
        while len(self._states) > self.limit:
            self.give_state()

    def give_state(self) -> bool:
        """Give up the state that was not used for longest, and points that lead nowhere after that."""
        if not self._states:
            return False
        key, _ = self._states.popitem(last=False)
        point: Point | None = self.points[key]
        assert point is not None and point.state is not None
        self._drop_all(point.state)
        point.state = None
        while point is not None and not point.children and point.state is None:
            point = self._remove(point)
        return True

    def give_entries(self) -> bool:
        """Give up the point that was not used for longest, of those that no other needs."""
        while self._leaves:
            used, key = heapq.heappop(self._leaves)
            point = self.points.get(key)
            if point is not None and point.used == used and not point.children:
                self._remove(point)
                return True
        return False

    def _touch(self, point: Point) -> None:
        self._clock += 1
        point.used = self._clock
        if not point.children:
            self._push(point)

    def _push(self, point: Point) -> None:
        """Offer a point that no other needs for removal; older offers of it are passed over."""
        if len(self._leaves) > 4 * len(self.points) + 64:
            self._leaves = [(p.used, p.key) for p in self.points.values() if not p.children]
            heapq.heapify(self._leaves)
        heapq.heappush(self._leaves, (point.used, point.key))

    def _remove(self, point: Point) -> Point | None:
        assert not point.children, "a point that others need is kept"
        del self.points[point.key]
        self._drop_all(point.entries)
        if point.state is not None:
            self._drop_all(point.state)
            del self._states[point.key]
        parent = self.points.get(point.parent)
        if parent is not None:
            parent.children -= 1
            if not parent.children:
                self._push(parent)
        return parent

    def _drop_all(self, pages: Pages) -> None:
        for family, held in pages.items():
            for page in held:
                self._drop(family, page)
