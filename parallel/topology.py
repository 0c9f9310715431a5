"""Topology: how many ranks there are and who belongs together. Pure arithmetic, no torch."""

from dataclasses import dataclass

Ranks = tuple[int, ...]

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
"""Kind of device -> the backend that its tensors travel on."""


@dataclass(frozen=True)
class Coordinates:
    """Where one world rank stands on every axis."""

    rank: int
    dp_rank: int
    tp_rank: int
    ep_rank: int
    ep_block: int


@dataclass(frozen=True)
class Topology:
    """The degrees of a mesh: `world` ranks, tensor (and context) groups of `tp`, expert groups of `ep`.

    tp runs fastest: world rank = dp_rank * tp + tp_rank. Expert groups are contiguous blocks of `ep` ranks.
    ValueError names the equation that does not hold, the values and the legal choices.
    """

    world: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in ("world", "tp", "ep"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}, allowed: a whole number from 1")
        if self.world % self.tp:
            raise ValueError(
                f"world % tp must be 0, but world is {self.world} and tp is {self.tp}; "
                f"legal tp for world {self.world}: {divisors(self.world)}"
            )
        legal_ep = [n for n in divisors(self.world) if n % self.tp == 0]
        if self.world % self.ep:
            raise ValueError(
                f"world % ep must be 0, but world is {self.world} and ep is {self.ep}; "
                f"legal ep for world {self.world} and tp {self.tp}: {legal_ep}"
            )
        if self.ep % self.tp:
            raise ValueError(
                f"ep % tp must be 0, but ep is {self.ep} and tp is {self.tp}; "
                f"legal ep for world {self.world} and tp {self.tp}: {legal_ep}"
            )

    @property
    def dp(self) -> int:
        """How many tensor groups there are."""
        return self.world // self.tp

    @property
    def cp(self) -> int:
        """The context group is the tensor group by definition."""
        return self.tp

    def coordinates(self, rank: int) -> Coordinates:
        """Every coordinate of a world rank."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank is {rank}, allowed: 0 to {self.world - 1} in {self}")
        return Coordinates(rank, rank // self.tp, rank % self.tp, rank % self.ep, rank // self.ep)

    def tp_groups(self) -> tuple[Ranks, ...]:
        """World ranks of every tensor group, by dp_rank."""
        return _blocks(self.world, self.tp)

    def ep_groups(self) -> tuple[Ranks, ...]:
        """World ranks of every expert group, by ep_block."""
        return _blocks(self.world, self.ep)

    def expert_replicas(self) -> tuple[Ranks, ...]:
        """World ranks that hold the same experts, by ep_rank: one of every expert group."""
        return tuple(tuple(range(ep_rank, self.world, self.ep)) for ep_rank in range(self.ep))

    def dp_groups(self) -> tuple[Ranks, ...]:
        """World ranks that hold the same tp_rank, by tp_rank."""
        return tuple(tuple(range(tp_rank, self.world, self.tp)) for tp_rank in range(self.tp))

    def tp_ranks(self, rank: int) -> Ranks:
        """The tensor group of a world rank."""
        return self.tp_groups()[self.coordinates(rank).dp_rank]

    def ep_ranks(self, rank: int) -> Ranks:
        """The expert group of a world rank."""
        return self.ep_groups()[self.coordinates(rank).ep_block]

    def check_model(self, o_groups: int, vocab_size: int, n_routed_experts: int) -> None:
        """ValueError unless output groups and vocabulary divide by tp, and routed experts by ep."""
        self._check_divides("o_groups", o_groups, "tp", self.tp)
        self._check_divides("vocab_size", vocab_size, "tp", self.tp)
        self._check_divides("n_routed_experts", n_routed_experts, "ep", self.ep)

    def _check_divides(self, name: str, value: int, axis: str, degree: int) -> None:
        if value % degree:
            legal = [n for n in divisors(self.world) if value % n == 0]
            raise ValueError(
                f"{name} % {axis} must be 0, but {name} is {value} and {axis} is {degree}; "
                f"legal {axis} for {name} {value} and world {self.world}: {legal}"
            )

    def require_same(self, other: "Topology", what: str) -> None:
        """ValueError naming both topologies if `what` was built for `other` and is used with this one."""
        if self != other:
            raise ValueError(f"{what} was built for {other}, but is used with {self}")


def divisors(value: int) -> list[int]:
    """All divisors, ascending."""
    return [n for n in range(1, value + 1) if value % n == 0]


def _blocks(world: int, size: int) -> tuple[Ranks, ...]:
    return tuple(tuple(range(first, first + size)) for first in range(0, world, size))
