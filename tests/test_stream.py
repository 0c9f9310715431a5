"""Streams of rows between two ranks of a split world: order, bounds, ends from both sides, and failures."""

import time

import pytest
import torch
from rank_pool import from_bytes, to_bytes

from meshspark.comm.collectives import all_gather_rows
from meshspark.comm.stream import RowReceiver, RowSender
from meshspark.parallel.errors import CommError
from meshspark.parallel.topology import Topology

PARTS = [Topology(1, 1, 1), Topology(1, 1, 1)]
KEPT = {}


def _block(number, rows=5, columns=3):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(rows, columns, generator=generator).bfloat16()


def _part(groups):
    """One split for all tests of a pool's ranks: process groups are never given back."""
    if "part" not in KEPT:
        KEPT["part"] = groups.split(PARTS)
    return KEPT["part"]


def _blocks(groups, counts, depth, stop_after=None):
    """Rank 0 sends blocks of these numbers of rows; what each side saw."""
    part = _part(groups)
    if part.number == 0:
        sender = RowSender(part.bridge, 1, 3, torch.bfloat16, depth)
        sent = [sender.send(_block(i, rows), stage="features") for i, rows in enumerate(counts)]
        sender.finish(stage="features")
        return [sent, len(sender._posted)]
    receiver, found = RowReceiver(part.bridge, 0, 3, torch.bfloat16), []
    while (block := receiver.receive(stage="features")) is not None:
        found.append(to_bytes(block))
        if len(found) == stop_after:
            receiver.stop(stage="features")
    assert receiver.receive(stage="features") is None and not receiver._told
    return found


@pytest.mark.parametrize("depth", [1, 3])
def test_blocks_come_in_order_and_bit_for_bit(ranks, depth):
    counts = [5, 0, 1, 7, 2]
    (sent, left), found = ranks.run(
        Topology(2, 1, 2), "test_stream:_blocks", transport="torch", counts=counts, depth=depth
    )
    assert sent == [True] * 5 and left == 0
    assert len(found) == 5
    assert all(torch.equal(from_bytes(each), _block(i, counts[i])) for i, each in enumerate(found))


@pytest.mark.parametrize("stop_after", [1, 2, 6])
def test_the_receiver_may_stop_at_any_block(ranks, stop_after):
    (sent, left), found = ranks.run(
        Topology(2, 1, 2), "test_stream:_blocks", transport="torch", counts=[2] * 9, depth=2, stop_after=stop_after
    )
    assert len(found) == stop_after and left == 0
    assert stop_after <= sum(sent) <= stop_after + 2 and sent == sorted(sent, reverse=True)


def _bounded(groups):
    """Seconds until the sender's second and third block are posted, where the receiver waits before it takes any."""
    part = _part(groups)
    if part.number == 1:
        time.sleep(1.0)
        receiver = RowReceiver(part.bridge, 0, 3, torch.bfloat16)
        while receiver.receive(2, stage="features") is not None:
            pass
        return []
    sender, times = RowSender(part.bridge, 1, 3, torch.bfloat16, 2), []
    for i in range(3):
        begin = time.perf_counter()
        sender.send(_block(i, 2), stage="features")
        times.append(time.perf_counter() - begin)
    sender.finish(stage="features")
    return times


def test_the_sender_waits_for_what_is_not_taken(ranks):
    times, _ = ranks.run(Topology(2, 1, 2), "test_stream:_bounded", transport="torch")
    assert max(times[:2]) < 0.5 < times[2]


def _own_groups(groups):
    """Each part's world, and both together again behind it."""
    part = _part(groups)
    own = part.groups
    alone = all_gather_rows(torch.tensor([[own.rank]]), own.world, stage="own").tolist()
    return [
        part.number,
        own.rank,
        own.topology.world,
        alone,
        len(all_gather_rows(torch.zeros(1), groups.world, stage="x")),
    ]


def test_parts_count_their_own_ranks(ranks):
    found = ranks.run(Topology(2, 1, 2), "test_stream:_own_groups")
    assert found == [[0, 0, 1, [[0]], 2], [1, 0, 1, [[0]], 2]]


def _uneven_parts(groups):
    part = groups.split([Topology(1, 1, 1), Topology(3, 1, 3)])
    own = part.groups
    rows = all_gather_rows(torch.tensor([[groups.rank]]), own.ep, stage="own").flatten().tolist()
    replicas = own.expert_replicas().ranks
    return [part.number, own.rank, rows, list(own.world.ranks), list(replicas)]


def test_parts_of_several_ranks(ranks):
    found = ranks.run(Topology(4, 1, 4), "test_stream:_uneven_parts", timeout=120)
    mine = [[1, rank, [1, 2, 3], [1, 2, 3], [rank + 1]] for rank in range(3)]
    assert found == [[0, 0, [0], [0], [0]], *mine]


def _wrong(groups, kind):
    part = _part(groups)
    if part.number == 0:
        sender = RowSender(part.bridge, 1, 3, torch.bfloat16)
        if kind == "dies":
            raise SystemExit(3)
        sender.send(_block(0, 4), stage="features")
        try:
            sender.finish(stage="features")
        except CommError as problem:
            return str(problem)
    receiver = RowReceiver(part.bridge, 0, 3, torch.bfloat16)
    try:
        receiver.receive(5, stage="features")
    except CommError as problem:
        return str(problem)
    return "nothing"


def test_both_sides_end_where_a_block_is_not_what_was_awaited(ranks):
    sender, receiver = ranks.run(Topology(2, 1, 2), "test_stream:_wrong", transport="torch", kind="rows")
    assert "block 1 has 4 rows, awaited: 5" in receiver and sender != "nothing"
    ranks.pool(2).kill()


def test_a_receiver_ends_with_its_sender(ranks):
    found = ranks.pool(2).run_surviving(Topology(2, 1, 2), "test_stream:_wrong", (0,), transport="torch", kind="dies")
    assert found[1] != "nothing"


def test_wrong_rows_are_named():
    from meshspark.parallel.groups import Groups

    group = Groups.single().world
    with pytest.raises(ValueError, match="depth is 0"):
        RowSender(group, 0, 3, torch.bfloat16, 0)
    with pytest.raises(ValueError, match="does not travel"):
        RowReceiver(group, 0, 3, torch.int16)
    with pytest.raises(ValueError, match=r"rows are torch.float32 \[2, 3\], allowed: torch.bfloat16 \[rows, 3\]"):
        RowSender(group, 0, 3, torch.bfloat16).send(torch.zeros(2, 3), stage="x")
    with pytest.raises(ValueError, match=r"parts have \[1, 1\] ranks, allowed: 1 in all"):
        Groups.single().split(PARTS)
