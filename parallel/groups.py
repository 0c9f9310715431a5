"""Groups: the process groups of a topology. The only file that starts torch.distributed and makes groups."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from .errors import CommError, TransportError, error_kind, first_line
from .group import Group, Health, Wiring
from .ledger import Ledger
from .preflight import Fact, compare_facts
from .topology import Topology

# Idle ranks wait for rank 0 without a limit that anybody will meet; a closed connection still ends the wait.
IDLE_SECONDS = 365.0 * 24 * 3600

__all__ = ["Group", "Groups", "Health", "IDLE_SECONDS"]


class Connections(Wiring, Protocol):
    """What connects ranks beside the backend; made by a floor above, ended with the groups."""

    def told(self) -> Mapping[str, Fact]:
        """What this rank tells all others when they meet."""

    def check(self, told: Sequence[Mapping[str, Fact]]) -> None:
        """Raise on all ranks alike where what they told cannot work, before a backend starts."""

    def connect(self, groups: "Groups") -> None:
        """Equip new groups. Collective over the world."""


@dataclass(eq=False)
class Groups:
    """All groups in which one rank takes part.

    `world`, `tp` and `ep` move rows on `device`; `control` is a CPU group over the world for small exchanges
    of numbers and bytes (the world group itself on gloo); `front` only wakes idle ranks. cp is tp. first: of a part of
    a world (`split`), whose ranks count from 0, the world rank of the first.
    """

    topology: Topology
    rank: int
    device: str
    backend: str
    world: Group
    tp: Group
    ep: Group
    control: Group
    front: Group
    ledger: Ledger
    health: Health
    store: dist.Store | None = None
    told: tuple[dict[str, Fact], ...] = ()
    connections: Connections | None = None
    owns_world: bool = True
    closed: bool = False
    replicas: Group | None = None
    first: int | None = None

    @property
    def cp(self) -> Group:
        """The context group: the tensor group by definition."""
        return self.tp

    @classmethod
    def single(cls, device: str = "cpu", topology: Topology | None = None, ledger: Ledger | None = None) -> "Groups":
        """Groups of one rank: no process group, nothing started."""
        topology = Topology() if topology is None else topology
        if topology.world != 1:
            raise ValueError(f"world is {topology.world} in {topology}, allowed: 1 for a rank alone")
        return _Maker(topology, 0, "none", device, 60.0, Ledger() if ledger is None else ledger).single()

    @classmethod
    def start(
        cls,
        topology: Topology,
        *,
        rank: int,
        backend: str,
        device: str = "cpu",
        timeout: float = 60.0,
        store: dist.Store | None = None,
        facts: Mapping[str, Fact] | None = None,
        ledger: Ledger | None = None,
        connections: Connections | None = None,
    ) -> "Groups":
        """Start torch.distributed and make every group, in one order on all ranks, `timeout` seconds on each.

        Without a `store` the ranks meet where torchrun's environment says. Before a group is made the ranks
        compare versions, topology and `facts` through the store; CollectiveMismatch on every rank if they differ.
        A world of one starts nothing. ValueError if torch.distributed runs already (use `derive`).
        """
        topology.coordinates(rank)
        if topology.world == 1:
            return cls.single(device, topology, ledger)
        if dist.is_initialized():
            raise ValueError("torch.distributed is already started; close the first groups or derive from them")
        if not timeout > 0:
            raise ValueError(f"timeout is {timeout}, allowed: seconds above 0")
        store = _meet(topology, rank, timeout) if store is None else store
        # A store may outlive several starts: a number of its own keeps their keys apart.
        store = dist.PrefixStore(f"meshspark{store.add(f'meshspark/starts/{rank}', 1)}", store)
        ends = timedelta(seconds=timeout)
        own = None if connections is None else connections.told()
        told = compare_facts(store, topology, rank, facts or {}, told=own, timeout=timeout)
        if connections is not None:
            connections.check(told)
        try:
            dist.init_process_group(backend, store=store, rank=rank, world_size=topology.world, timeout=ends)
        except RuntimeError as problem:
            raise _start_error(problem, topology) from problem
        try:
            own_ledger = Ledger() if ledger is None else ledger
            maker = _Maker(topology, rank, backend, device, timeout, own_ledger, store, tuple(told), connections)
            return maker.make()
        except BaseException as problem:
            dist.destroy_process_group()
            if isinstance(problem, RuntimeError) and not isinstance(problem, CommError):
                raise _start_error(problem, topology) from problem
            raise

    def derive(self, topology: Topology, facts: Mapping[str, Fact] | None = None) -> "Groups":
        """Groups of another topology over the same world. All ranks call it in the same order."""
        if topology.world != self.topology.world:
            raise ValueError(f"world is {self.topology.world} and cannot become {topology.world}")
        if topology.world == 1:
            return Groups.single(self.device, topology, self.ledger)
        if self.closed or self.health.failure is not None:
            raise self.health.failure or ValueError("these groups are closed")
        assert self.store is not None, "a world of several ranks met in a store"
        store = dist.PrefixStore(f"derived{self.store.add(f'derived/{self.rank}', 1)}", self.store)
        compare_facts(store, topology, self.rank, facts or {}, timeout=self.world.timeout)
        own = (self.rank, self.backend, self.device, self.world.timeout, self.ledger)
        return _Maker(topology, *own, store, self.told, self.connections).make(self)

    def expert_replicas(self) -> Group:
        """The ranks that hold the same experts as this one, over which their gradients are averaged.

        Made when first asked for, by all ranks of the world at the same place; it moves rows by the backend.
        """
        if self.replicas is None:
            if self.closed or self.health.failure is not None:
                raise self.health.failure or ValueError("these groups are closed")
            own = (self.rank, self.backend, self.device, self.world.timeout, self.ledger)
            maker = _Maker(self.topology, *own, self.store, self.told, self.connections, self.health, self.first)
            self.replicas = maker._sub_groups("replicas", self.topology.expert_replicas())
        return self.replicas

    def split(self, parts: Sequence[Topology]) -> "Part":
        """The world in consecutive parts, each with groups of its own topology and with ranks counted from 0.

        All ranks call it alike. ValueError unless the parts hold every rank. A failure in one part is one of all: they
        share their health, and the world's connections are the first groups' to close.
        """
        if sum(part.world for part in parts) != self.topology.world:
            sizes = [part.world for part in parts]
            raise ValueError(f"parts have {sizes} ranks, allowed: {self.topology.world} in all")
        if self.closed or self.health.failure is not None:
            raise self.health.failure or ValueError("these groups are closed")
        place = (self.backend, self.device, self.world.timeout, self.ledger, None, self.told, self.connections)
        maker = _Maker(self.topology, self.rank, *place, self.health)
        bridge = maker.bridge()
        first = 0
        for number, topology in enumerate(parts):
            if first <= self.rank < first + topology.world:
                maker = _Maker(topology, self.rank - first, *place, self.health, first)
                return Part(number, maker.make_part(self.front.timeout), bridge)
            first += topology.world
        raise AssertionError("the parts hold every rank")

    def close(self) -> None:
        """End the groups; without effect when called again. Waits for nobody.

        Derived groups end only their own and leave the world to those that started it.
        """
        if self.closed:
            return
        self.closed = True
        failure = self.health.failure or TransportError("the groups are closed", ranks=self.world.ranks)
        if self.owns_world:
            self.health.failure = failure
            if self.connections is not None:
                self.connections.close()
            if self.world.process_group is not None and dist.is_initialized():
                dist.destroy_process_group()
        else:
            self._close_own(failure)

    def _close_own(self, failure: CommError) -> None:
        replicas = [] if self.replicas is None else [self.replicas]
        own = Health(failure, [self.tp, self.ep, *replicas])
        own.hang_up()
        for group in (self.world, self.tp, self.ep, self.control, self.front, *replicas):
            self.health.groups.remove(group)
            group.health = own


@dataclass(frozen=True)
class Part:
    """One rank's part of a split world: its number, its groups, and the bridge, a CPU group over the whole world for
    rows between two ranks."""

    number: int
    groups: Groups
    bridge: Group


def _meet(topology: Topology, rank: int, timeout: float) -> dist.Store:
    """The store that torchrun's environment names."""
    ends = timedelta(seconds=timeout)
    try:
        store, _, _ = next(dist.rendezvous("env://", rank, topology.world, timeout=ends))
    except RuntimeError as problem:
        raise _start_error(problem, topology) from problem
    return store


def _start_error(problem: Exception, topology: Topology) -> CommError:
    kind = error_kind(str(problem))
    ranks = range(topology.world)
    return kind(first_line(problem), group="world", sequence=0, op="start", stage="start", ranks=ranks)


@dataclass
class _Maker:
    """Makes the groups of one rank in the one order that all ranks follow."""

    topology: Topology
    rank: int
    backend: str
    device: str
    timeout: float
    ledger: Ledger
    store: dist.Store | None = None
    told: tuple[dict[str, Fact], ...] = ()
    connections: Connections | None = None
    health: Health = field(default_factory=Health)
    first: int | None = None
    """World rank of the topology's rank 0, where it is a part of the world; only that part's ranks make its groups."""

    def single(self) -> Groups:
        world, tp, ep, control, front = (
            self._group(name, (0,), None) for name in ("world", "tp", "ep", "control", "front")
        )
        return self._groups(world, tp, ep, control, front, True)

    def make(self, base: Groups | None = None) -> Groups:
        everyone = tuple(range(self.topology.world))
        if base is None:
            world = self._group("world", everyone, dist.group.WORLD)
            control = world
            if self.backend != "gloo":
                control = self._group("control", everyone, self._new(everyone, "gloo"), device="cpu")
                world.side = control.process_group
        else:
            self.health = base.health
            world, control = self._adopt(base.world), self._adopt(base.control)
        if base is None:
            front = self._group("front", everyone, self._new(everyone, "gloo"), IDLE_SECONDS, "cpu")
        else:
            front = self._adopt(base.front)
        tp = self._sub_groups("tp", self.topology.tp_groups())
        ep = self._sub_groups("ep", self.topology.ep_groups())
        groups = self._groups(world, tp, ep, control, front, base is None)
        if self.connections is not None:
            self.connections.connect(groups)
            self.health.wiring = self.connections
        return groups

    def make_part(self, idle: float) -> Groups:
        """Groups over the ranks of a part, which alone call it."""
        everyone = self._world_ranks(tuple(range(self.topology.world)))
        several = len(everyone) > 1
        world = self._group("world", everyone, self._new(everyone, self.backend) if several else None)
        control = world
        if self.backend != "gloo":
            control = self._group("control", everyone, self._new(everyone, "gloo") if several else None, device="cpu")
            world.side = control.process_group
        front = self._group("front", everyone, self._new(everyone, "gloo") if several else None, idle, "cpu")
        tp = self._sub_groups("tp", self.topology.tp_groups())
        ep = self._sub_groups("ep", self.topology.ep_groups())
        groups = self._groups(world, tp, ep, control, front, False)
        if self.connections is not None:
            self.connections.connect(groups)
        return groups

    def bridge(self) -> Group:
        """A CPU group over the whole world that nothing but sends and receives of two ranks use."""
        everyone = tuple(range(self.topology.world))
        return self._group("bridge", everyone, self._new(everyone, "gloo"), device="cpu")

    def _world_ranks(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        return ranks if self.first is None else tuple(self.first + rank for rank in ranks)

    def _groups(self, world: Group, tp: Group, ep: Group, control: Group, front: Group, owns: bool) -> Groups:
        return Groups(
            self.topology,
            self.rank,
            self.device,
            self.backend,
            world,
            tp,
            ep,
            control,
            front,
            self.ledger,
            self.health,
            self.store,
            self.told,
            self.connections,
            owns,
            first=self.first,
        )

    def _sub_groups(self, name: str, members: tuple[tuple[int, ...], ...]) -> Group:
        mine: Group | None = None
        for ranks in map(self._world_ranks, members):
            if self.first is not None and self.rank + self.first not in ranks:
                continue
            several = len(ranks) > 1
            process_group = self._new(ranks, self.backend) if several else None
            side = self._new(ranks, "gloo") if several and self.backend != "gloo" else None
            if self.rank + (self.first or 0) in ranks:
                mine = self._group(name, ranks, process_group)
                mine.side = side
        assert mine is not None
        return mine

    def _new(self, ranks: tuple[int, ...], backend: str) -> dist.ProcessGroup:
        # Ranks of other parts are elsewhere, and do not come by.
        alone = self.first is not None
        ends = timedelta(seconds=self.timeout)
        return dist.new_group(list(ranks), timeout=ends, backend=backend, use_local_synchronization=alone)

    def _group(
        self,
        name: str,
        ranks: tuple[int, ...],
        process_group: dist.ProcessGroup | None,
        timeout: float | None = None,
        device: str | None = None,
    ) -> Group:
        group = Group(
            name,
            ranks,
            ranks.index(self.rank + (self.first or 0)),
            process_group,
            self.timeout if timeout is None else timeout,
            ledger=self.ledger,
            topology=self.topology,
            device=self.device if device is None else device,
            health=self.health,
            number=self.health.made,
        )
        self.health.made += 1
        self.health.groups.append(group)
        return group

    def _adopt(self, group: Group) -> Group:
        return self._group(group.name, group.ranks, group.process_group, group.timeout, group.device)
