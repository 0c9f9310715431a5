"""The physical pages of one cache family, counted by reference. No tensors."""

from collections.abc import Callable


class PagePool:
    """Pages 0 to count - 1. A page is free, or held by as many holders as it has references.

    make_room is called when no page is left, gives some holder's pages up and says whether it had any.
    """

    def __init__(self, name: str, count: int, make_room: Callable[[], bool]) -> None:
        self.name, self.count = name, count
        self.free = list(range(count - 1, -1, -1))
        self.references = [0] * count
        self.peak = 0
        self._make_room = make_room

    @property
    def used(self) -> int:
        return self.count - len(self.free)

    def take(self) -> int:
        """A free page, now held once. RuntimeError where nobody can give one up."""
        while not self.free:
            if not self._make_room():
                raise RuntimeError(f"{self.name}: all {self.count} pages are held by requests that run")
        page = self.free.pop()
        self.references[page] = 1
        self.peak = max(self.peak, self.used)
        return page

    def share(self, page: int) -> None:
        """One more holder of a page that is held."""
        assert self.references[page] > 0, f"{self.name}: page {page} is free and cannot be shared"
        self.references[page] += 1

    def drop(self, page: int) -> None:
        """One holder less; the page is free when the last one goes."""
        assert self.references[page] > 0, f"{self.name}: page {page} is given back twice"
        self.references[page] -= 1
        if not self.references[page]:
            self.free.append(page)
