"""Where a drafter's samples come from: feature files, a target on the same ranks, or a target on ranks of its own.

Letters: S positions of a sample, C columns of a token's states: F of the captured layers, then H of the head's input.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ...comm.agreement import agree
from ...comm.stream import RowReceiver, RowSender
from ...parallel.group import Group
from ...parallel.groups import Groups
from .capture import Features, TargetCapture
from .feature_files import FeatureFiles
from .feature_spec import FeatureSpec
from .order import DataOrder, Draw
from .samples import FEATURES, IDS, MASK, TEACHER
from .token_files import TokenFiles, TokenSample

Sample = Mapping[str, Tensor]


class FeatureSource(Protocol):
    """Gives this rank's samples of each micro-batch, in the order of steps. All ranks of a run ask alike."""

    def micro_batch(self, step: int, micro: int) -> tuple[list[Draw], list[Sample]]:
        """Samples with their numbers, as `samples.collate` takes them."""

    def stop(self) -> None:
        """No more are asked for."""


class FileSource:
    """Samples of feature files; states are read where they are used."""

    def __init__(self, files: FeatureFiles, order: DataOrder, rank: int) -> None:
        self._files, self._order, self._rank = files, order, rank

    def micro_batch(self, step: int, micro: int) -> tuple[list[Draw], list[Sample]]:
        draws = self._order.micro_batch(step, micro, self._rank)
        return draws, [self._files[draw.sample] for draw in draws]

    def stop(self) -> None:
        """Nothing waits for it."""


class SameRanksSource:
    """A target on the trainer's own ranks: a TP group runs the sequences of all its ranks, each gets its own."""

    def __init__(self, data: TokenFiles, order: DataOrder, capture: TargetCapture) -> None:
        """ValueError unless the order deals to the target's ranks."""
        groups = capture.model.groups
        if order.ranks != groups.topology.world:
            raise ValueError(f"samples are dealt to {order.ranks} ranks, allowed: the target's {groups.topology.world}")
        self._data, self._order, self._capture = data, order, capture
        self._ranks, self._me = groups.tp.ranks, groups.tp.rank

    def micro_batch(self, step: int, micro: int) -> tuple[list[Draw], list[Sample]]:
        draws = [self._order.micro_batch(step, micro, rank) for rank in self._ranks]
        owners = [tp_rank for tp_rank, each in enumerate(draws) for _ in each]
        tokens = [self._data[draw.sample] for each in draws for draw in each]
        found = self._capture.run([each.input_ids.tolist() for each in tokens], owners)
        mine = [place for place, owner in enumerate(owners) if owner == self._me]
        return draws[self._me], [as_sample(tokens[place], found[place]) for place in mine]

    def stop(self) -> None:
        """Nothing waits for it."""


class ShippedSource:
    """Samples whose states a rank of the target sends, in BF16, one block a sample (`ship`)."""

    def __init__(
        self, data: TokenFiles, order: DataOrder, spec: FeatureSpec, rank: int, bridge: Group, sender: int
    ) -> None:
        """rank: of this drafter's among those that train; sender: the bridge's rank that sends to it."""
        self._data, self._order, self._spec, self._rank = data, order, spec, rank
        self._stream = RowReceiver(bridge, sender, stream_columns(spec), torch.bfloat16)

    def micro_batch(self, step: int, micro: int) -> tuple[list[Draw], list[Sample]]:
        draws = self._order.micro_batch(step, micro, self._rank)
        return draws, [self._receive(self._data[draw.sample]) for draw in draws]

    def _receive(self, sample: TokenSample) -> Sample:
        rows_SC = self._stream.receive(len(sample), stage="features")
        assert rows_SC is not None, "the target sends the samples of every step that is taken"
        hidden, last = rows_SC[:, : self._spec.width], rows_SC[:, self._spec.width :]
        return as_sample(sample, Features(hidden, last if self._spec.teacher else None))

    def stop(self) -> None:
        """Tell the target's rank, which may be ahead, and take what it has under way."""
        self._stream.stop(stage="features")


def stream_columns(spec: FeatureSpec) -> int:
    """C: what a token's states take in a stream."""
    return spec.width + spec.teacher * spec.hidden_size


def sender_of(rank: int, target_groups: int, tp: int) -> int:
    """The rank among the target's that sends to a drafter's rank: tp_rank 0 of the TP groups in turn."""
    return rank % target_groups * tp


def ship(
    capture: TargetCapture,
    data: TokenFiles,
    order: DataOrder,
    steps: range,
    bridge: Group,
    depth: int = 2,
    *,
    tell: Callable[[int], None] = lambda step: None,
) -> int:
    """A target rank's part of a run whose drafters are elsewhere: the number of steps that it ran for.

    Runs the samples of each micro-batch of `steps`, a TP group those of its drafters, and sends each drafter its own,
    in order; at most `depth` samples to each are under way. The drafters are the bridge's first ranks.
    Ends when all is taken, or soon after a drafter has stopped, on all ranks of the target alike. tell: is given each
    step that begins.
    """
    groups = capture.model.groups
    place, topology = groups.topology.coordinates(groups.rank), groups.topology
    mine = [rank for rank in range(order.ranks) if sender_of(rank, topology.dp, 1) == place.dp_rank]
    columns = stream_columns(capture.spec)
    senders = {
        rank: RowSender(bridge, rank, columns, torch.bfloat16, depth) for rank in (mine if place.tp_rank == 0 else ())
    }
    done = 0
    for step, micro in ((step, micro) for step in steps for micro in range(order.accumulate)):
        if micro == 0:
            tell(step)
        goes_on = _ship_one(capture, data, order, (step, micro), mine, senders)
        if _stopped(goes_on, groups):
            break
        done += micro == order.accumulate - 1
    for sender in senders.values():
        sender.finish(stage="features")
    return done


def _ship_one(
    capture: TargetCapture,
    data: TokenFiles,
    order: DataOrder,
    at: tuple[int, int],
    ranks: Sequence[int],
    senders: Mapping[int, RowSender],
) -> bool:
    """Run and send a micro-batch; False once a drafter has stopped."""
    takers = [rank for rank in ranks for _ in range(order.batch)]
    tokens = [data[draw.sample] for rank in ranks for draw in order.micro_batch(*at, rank)]
    found = capture.run([each.input_ids.tolist() for each in tokens])
    goes_on = True
    for place, taker in enumerate(takers if senders else ()):
        states = found[place]
        parts = [states.hidden_states] + ([] if states.last_hidden_states is None else [states.last_hidden_states])
        goes_on &= senders[taker].send(torch.cat(parts, -1), stage="features")
    return goes_on


def _stopped(goes_on: bool, groups: Groups) -> bool:
    """Whether any rank's drafter has stopped, alike on all ranks of the target: they run every forward together."""
    return any(stopped for (stopped,) in agree([not goes_on], groups, stage="features"))


def as_sample(tokens: TokenSample, features: Features) -> Sample:
    """What `samples.collate` takes, on the host."""
    sample = {
        IDS: torch.from_numpy(tokens.input_ids)[None],
        MASK: torch.from_numpy(tokens.loss_mask)[None],
        FEATURES: features.hidden_states.cpu()[None],
    }
    if features.last_hidden_states is not None:
        sample[TEACHER] = features.last_hidden_states.cpu()[None]
    return sample
