"""Each exchange against its oracle at 1 to 4 ranks: every dtype it promises, every bit, every layout."""

import msgpack
import pytest
import torch

from meshspark.comm import agreement, backend, collectives, oracle
from meshspark.layouts.bits import raw_view, same_bits
from meshspark.parallel.groups import Groups
from meshspark.parallel.ledger import Ledger, Record
from meshspark.parallel.topology import Topology

WORLDS = (1, 2, 3, 4)

LAYOUTS = {
    "plain": lambda x: x.clone(),
    "transposed": lambda x: x.t().contiguous().t(),
    "column slice": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "row step": lambda x: torch.stack([x, x], 1).flatten(0, 1)[::2],
    "one column": lambda x: x[:, 1:2],
    "one row": lambda x: x[1:2],
    "odd stride of a size 1": lambda x: torch.as_strided(x.contiguous(), (1, x.shape[1]), (3, 1)),
    "zero rows": lambda x: x[:0],
    "zero columns": lambda x: x[:, :0],
    "three dims": lambda x: x.contiguous().view(x.shape[0], 2, -1).transpose(1, 2),
    "one dim": lambda x: x.flatten()[::3],
    "negative and expanded": lambda x: x[:1].expand(5, x.shape[1]),
}


def random_rows(rows, columns, dtype, seed):
    """Random bytes as rows of any dtype: NaN payloads and subnormals included."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, (rows, columns), generator=generator).bool()
    raw = torch.randint(0, 256, (rows, columns * dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.view(dtype) if raw.numel() else torch.empty((rows, columns), dtype=dtype)


def _same(got, wanted):
    assert got.dtype == wanted.dtype and got.shape == wanted.shape, (got.shape, wanted.shape)
    assert same_bits(got, wanted)


def gather_everything(groups):
    group, ranks = groups.world, range(groups.topology.world)
    for dtype in backend.WIRE_DTYPES:
        for name, layout in LAYOUTS.items():
            xs = [layout(random_rows(6, 8, dtype, 10 + rank)) for rank in ranks]
            got = collectives.all_gather_rows(xs[group.rank], group, stage=f"{dtype} {name}")
            _same(got, oracle.all_gather_rows(xs)[group.rank])


def exchange_everything(groups):
    group, size = groups.world, groups.topology.world
    distinct = [[(3 * s + 5 * d) % 7 + s for d in range(size)] for s in range(size)]
    only_first = [[d + 1 if s == 0 else 0 for d in range(size)] for s in range(size)]
    to_last = [[4 if d == size - 1 else 0 for d in range(size)] for s in range(size)]
    nothing = [[0] * size for _ in range(size)]
    for dtype in backend.WIRE_DTYPES:
        for counts in (distinct, only_first, to_last, nothing):
            for turn in (False, True):
                xs = [random_rows(sum(row), 6, dtype, s) for s, row in enumerate(counts)]
                xs = [x.t().contiguous().t() if turn else x for x in xs]
                back = [row[group.rank] for row in counts]
                got = collectives.exchange_rows(xs[group.rank], group, counts[group.rank], back, stage="test")
                _same(got, oracle.exchange_rows(xs, counts)[group.rank])


def all_bits(groups):
    group, ranks = groups.world, range(groups.topology.world)
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    halves = torch.tensor([0x7F80, 0x7F81, 0x7FC1, 0xFF80, 0xFFC1, 0x7FFF, 0xFFFF, 0x8000, 1, 0], dtype=torch.int64)
    words = (halves[:, None] * 65536 + halves).flatten()
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    sent = [patterns.view(torch.bfloat16), patterns.view(torch.float16), words.view(torch.float32)]
    # Short rows go one way, long ones another.
    for x in [s.reshape(-1, 1) for s in sent] + [sent[0].repeat(24).view(-1, 256)]:
        xs = [raw_view(x).roll(rank, 0).view(x.dtype) for rank in ranks]
        _same(collectives.all_gather_rows(xs[group.rank], group, stage="bits"), oracle.all_gather_rows(xs)[group.rank])
        share = x.shape[0] // group.size
        counts = [[share] * (group.size - 1) + [x.shape[0] - share * (group.size - 1)] for _ in ranks]
        back = [row[group.rank] for row in counts]
        got = collectives.exchange_rows(xs[group.rank], group, counts[group.rank], back, stage="bits")
        _same(got, oracle.exchange_rows(xs, counts)[group.rank])


def both_ways_of_gathering(groups):
    group, ranks = groups.world, range(groups.topology.world)
    edge = backend.DIRECT_GATHER_BYTES // (64 * group.size)
    for rows in (edge - 1, edge, edge + 1, 3 * edge):
        xs = [random_rows(rows, 64, torch.uint8, rank) for rank in ranks]
        _same(collectives.all_gather_rows(xs[group.rank], group, stage="edge"), oracle.all_gather_rows(xs)[0])


def counts_and_bytes(groups):
    group, ranks = groups.world, range(groups.topology.world)
    counts = [torch.arange(group.size * 3).view(group.size, 3) + 100 * rank for rank in ranks]
    _same(collectives.exchange_counts(counts[group.rank], group, stage="c"), oracle.exchange_counts(counts)[group.rank])
    for source in ranks:
        payload = bytes(range(256)) * (source + 1)
        mine = payload if group.rank == source else None
        got = collectives.broadcast_bytes(mine, group, source, length=len(payload), stage="b")
        assert got == payload
    assert collectives.broadcast_bytes(b"" if group.rank == 0 else None, group, 0, length=0, stage="b") == b""


def _randn(rows, seed):
    return torch.randn(rows, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gradients(groups):
    group, size = groups.world, groups.topology.world
    counts = [[(s + 2 * d) % 3 for d in range(size)] for s in range(size)]
    xs = [_randn(sum(row), s).requires_grad_() for s, row in enumerate(counts)]
    weights = [_randn(sum(row[d] for row in counts), 50 + d) for d in range(size)]
    for d, got in enumerate(oracle.exchange_rows(xs, counts)):
        (got * weights[d]).sum().backward()
    wanted = xs[group.rank].grad
    x = xs[group.rank].detach().requires_grad_()
    got = collectives.exchange_rows(x, group, counts[group.rank], [row[group.rank] for row in counts], stage="g")
    (got * weights[group.rank]).sum().backward()
    _same(x.grad, wanted)


def first_of_my_group(groups):
    group = groups.tp
    word = str(groups.rank).encode() if group.rank == 0 else None
    said = collectives.broadcast_bytes(word, group, 0, length=1, stage="first")
    return [said.decode(), list(group.ranks), list(groups.ep.ranks), group.rank, groups.ep.rank]


def control(groups):
    table = agreement.agree([groups.rank, 7, -1], groups, length=3)
    assert table == [[rank, 7, -1] for rank in range(groups.topology.world)]
    message = {"add": [1, 2], "text": "x" * 1000}
    length = len(agreement.encode_control(message))
    own = message if groups.rank == 0 else None
    assert agreement.share_control(own, length, groups) == message
    (agreement.wake if groups.rank == 0 else agreement.sleep)(groups)


def unreadable_control(groups):
    for data in (msgpack.packb([1]), b"\xc1"):
        try:
            agreement.share_control(data if groups.rank == 0 else None, len(data), groups)
        except RuntimeError as problem:
            assert type(problem).__name__ == "TransportError"
        else:
            raise AssertionError("accepted")
    control(groups)


def ledger_of_a_call(groups):
    from meshspark.parallel.group import Group

    ledger = Ledger(2)
    world = groups.world
    group = Group("mine", world.ranks, world.rank, world.process_group, 30.0, ledger=ledger)
    for rows in (1, 2, 3):
        collectives.all_gather_rows(torch.zeros(rows, 4), group, stage=f"s{rows}")
    assert len(ledger) == (0 if group.size == 1 else 2)
    for record, rows in zip(ledger, (2, 3), strict=False):
        assert record[:9] == (
            rows,
            "mine",
            "all_gather_rows",
            "float32",
            rows,
            4,
            16 * rows * (group.size - 1),
            (),
            f"s{rows}",
        )
        assert record.start <= record.end


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    "body",
    [
        "gather_everything",
        "exchange_everything",
        "all_bits",
        "both_ways_of_gathering",
        "counts_and_bytes",
        "gradients",
        "control",
        "unreadable_control",
        "ledger_of_a_call",
    ],
)
def test_against_the_oracle(ranks, world, body):
    ranks.run_both(Topology(world, 1, world), f"test_collectives:{body}", timeout=120)


def test_sub_groups_have_their_own_first_rank(ranks):
    got = ranks.run_both(Topology(4, 2, 4), "test_collectives:first_of_my_group")
    everyone = [0, 1, 2, 3]
    assert got == [
        ["0", [0, 1], everyone, 0, 0],
        ["0", [0, 1], everyone, 1, 1],
        ["2", [2, 3], everyone, 0, 2],
        ["2", [2, 3], everyone, 1, 3],
    ]
    blocks = ranks.run(Topology(4, 1, 2), "test_collectives:first_of_my_group")
    assert [row[2] for row in blocks] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_a_group_of_one_gets_its_own_tensor_back():
    group = Groups.single().tp
    x = torch.zeros(3, 4).t()
    assert collectives.all_gather_rows(x, group, stage="s") is x
    assert collectives.exchange_rows(x, group, [4], [4], stage="s") is x


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16, torch.float8_e4m3fn, torch.complex64])
def test_what_does_not_travel_is_refused_before_anything_moves(dtype):
    with pytest.raises(ValueError, match=f"{dtype}.*allowed"):
        collectives.exchange_rows(torch.zeros(2, 2).to(dtype), Groups.single().tp, [2], [2], stage="s")


@pytest.mark.parametrize(
    ("send", "recv", "words"),
    [
        ([3], [3], "make 3 rows, but x has 2"),
        ([1, 1], [2], "send_counts"),
        ([2], [-1], "recv_counts"),
        ([2], [1], "only"),
    ],
)
def test_counts_that_do_not_add_up(send, recv, words):
    with pytest.raises(ValueError, match=words):
        collectives.exchange_rows(torch.zeros(2, 2), Groups.single().tp, send, recv, stage="s")


def test_other_refusals():
    group = Groups.single().tp
    with pytest.raises(ValueError, match="allowed: int64 with 1 rows"):
        collectives.exchange_counts(torch.zeros(2, dtype=torch.int64), group, stage="s")
    with pytest.raises(ValueError, match="payload has 2 bytes, announced are 3"):
        collectives.broadcast_bytes(b"ab", group, 0, length=3, stage="s")
    with pytest.raises(ValueError, match="source is 1"):
        collectives.broadcast_bytes(b"ab", group, 1, length=2, stage="s")
    with pytest.raises(ValueError, match="control message has 0 bytes"):
        agreement.share_control({}, 0, Groups.single())


def refuse_a_gradient(groups):
    try:
        collectives.all_gather_rows(torch.zeros(2, 2, requires_grad=True), groups.world, stage="s")
    except ValueError as problem:
        return str(problem)
    return "no error"


def test_a_gather_says_that_it_carries_no_gradient(ranks):
    assert all(
        "needs a gradient" in said for said in ranks.run(Topology(2, 1, 2), "test_collectives:refuse_a_gradient")
    )


@pytest.mark.parametrize(
    ("name", "variables", "words"),
    [
        ("gloo", {"GLOO_SOCKET_IFNAME": "^lo,docker"}, r"GLOO_SOCKET_IFNAME is '\^lo,docker'.*\['lo', 'eth0'\]"),
        ("nccl", {"GLOO_SOCKET_IFNAME": "nosuch0"}, "nosuch0"),
        ("hccl", {"HCCL_BUFFSIZE": "0"}, "HCCL_BUFFSIZE is '0'"),
        ("hccl", {"HCCL_BUFFSIZE": "big"}, "HCCL_BUFFSIZE is 'big'"),
        ("nccl", {"NCCL_BUFFSIZE": "-1"}, "NCCL_BUFFSIZE is '-1'"),
        ("mpi", {}, "backend is 'mpi'"),
    ],
)
def test_useless_environment_is_refused(name, variables, words):
    with pytest.raises(ValueError, match=words):
        backend.check_environment(name, variables, ["lo", "eth0"])


def test_useful_environment_is_listed():
    variables = {"GLOO_SOCKET_IFNAME": "lo", "HCCL_BUFFSIZE": "200", "HCCL_EXEC_TIMEOUT": "0", "HOME": "/"}
    shown = backend.check_environment("hccl", variables, ["lo"])
    assert shown == {"GLOO_SOCKET_IFNAME": "lo", "HCCL_BUFFSIZE": "200", "HCCL_EXEC_TIMEOUT": "0"}


def test_ledger_is_off_by_default_and_bounded():
    ledger = Ledger()
    record = Record(1, "g", "op", "float32", 1, 1, 4, (), "s", 0.0, 1.0)
    ledger.add(record)
    assert len(ledger) == 0 and not ledger.enabled
    ledger = Ledger(2)
    for _ in range(5):
        ledger.add(record)
    assert len(ledger) == 2
    ledger.clear()
    assert list(ledger) == []
    with pytest.raises(ValueError, match="capacity is -1"):
        Ledger(-1)
