"""The same-host path: every way that rows take, at its borders, gives what gloo gives; nothing is reused too early."""

import json
import os
import secrets
import socket
import stat
import threading
import time
from pathlib import Path

import pytest
import torch
from rank_pool import RankPool

from meshspark.comm import backend, collectives, connect, control_page, direct, local, oracle, window
from meshspark.comm.connect import Connections, Wish
from meshspark.layouts.bits import same_bits
from meshspark.parallel.errors import CollectiveMismatch, TransportError
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

EDGES = (0, 1, local.INLINE_BYTES - 1, local.INLINE_BYTES, local.INLINE_BYTES + 1)
FAR_EDGES = (local.DIRECT_BYTES - 1, local.DIRECT_BYTES, local.DIRECT_BYTES + 1, 3 << 20)


def random_bytes(size, *seed):
    generator = torch.Generator().manual_seed(hash(seed) & 0x7FFFFFFF)
    return torch.randint(0, 256, (size, 1), dtype=torch.uint8, generator=generator)


def gathers(groups):
    """Every size, gathered as a copy and as a view, against the oracle."""
    group, ranks = groups.world, range(groups.topology.world)
    for size in EDGES + FAR_EDGES:
        xs = [random_bytes(size, rank, size) for rank in ranks]
        wanted = oracle.all_gather_rows(xs)[0]
        assert same_bits(collectives.all_gather_rows(xs[group.rank], group, stage="copy"), wanted), size
        assert same_bits(collectives.view_gathered_rows(xs[group.rank], group, stage="view"), wanted), size
    return True


def _exchange(group, counts):
    xs = [random_bytes(sum(row), s, sum(row)) for s, row in enumerate(counts)]
    back = [row[group.rank] for row in counts]
    got = collectives.exchange_rows(xs[group.rank], group, counts[group.rank], back, stage="exchange")
    return same_bits(got, oracle.exchange_rows(xs, counts)[group.rank])


def exchanges(groups, reads):
    """Ranks that take different ways in one call; reads: whether memory may be read directly."""
    group, size = groups.world, groups.topology.world
    read = group.control.host.read
    if not reads:
        group.control.host.read = None
    try:
        for most in EDGES + FAR_EDGES:
            assert _exchange(group, [[most] * size for _ in range(size)]), most
            # One rank's rows go far, another's ride along, a third has none.
            mixed = [
                [(most, 5, 0, 700)[s % 4] if d == s - 1 or d == size - 1 else 1 for d in range(size)]
                for s in range(size)
            ]
            assert _exchange(group, mixed), most
            assert _exchange(
                group, [[most if s == 0 and d == size - 1 else 0 for d in range(size)] for s in range(size)]
            ), most
    finally:
        group.control.host.read = read
    return read is not None


def reused_buffers(groups, epochs):
    """The input is overwritten as soon as the call returns, and ranks dawdle in turn."""
    group, ranks = groups.world, range(groups.topology.world)
    sizes = (100, 3000, 40_000, 120_000)
    for epoch in range(epochs):
        rows = sizes[epoch % len(sizes)]
        x = torch.full((rows, 1), float(1000 * epoch + group.rank))
        if epoch % group.size == group.rank and epoch % 5 == 0:
            time.sleep(0.002)
        got = collectives.all_gather_rows(x, group, stage="gather")
        x.fill_(float("nan"))
        for rank in ranks:
            assert (got[rank * rows : (rank + 1) * rows] == 1000 * epoch + rank).all(), (epoch, rank)
        y = torch.full((rows * group.size, 1), float(1000 * epoch + group.rank))
        back = collectives.exchange_rows(y, group, [rows] * group.size, [rows] * group.size, stage="exchange")
        y.fill_(float("nan"))
        for rank in ranks:
            assert (back[rank * rows : (rank + 1) * rows] == 1000 * epoch + rank).all(), (epoch, rank)
    return True


def reductions(groups, reads):
    """Sums in rank order: bits equal to a plain loop, in a dtype where the order shows."""
    group, ranks = groups.world, range(groups.topology.world)
    read, group.control.host.read = group.control.host.read, group.control.host.read if reads else None
    try:
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            for rows in (1, 1000, 70_001):
                seeds = [torch.Generator().manual_seed(7 * rank + rows) for rank in ranks]
                xs = [torch.randn(rows * group.size, 3, generator=seed).to(dtype) for seed in seeds]
                wide = torch.promote_types(dtype, torch.float32)
                total = xs[0].to(wide)
                for x in xs[1:]:
                    total = total + x.to(wide)
                total = total.to(dtype)
                mine = total[group.rank * rows : (group.rank + 1) * rows]
                assert same_bits(collectives.reduce_scatter_rows(xs[group.rank], group, stage="rs"), mine)
                assert same_bits(collectives.all_reduce_rows(xs[group.rank], group, stage="ar"), total)
                odd = collectives.all_reduce_rows(xs[group.rank][: rows * group.size - 1], group, stage="odd")
                assert same_bits(odd, total[:-1])
    finally:
        group.control.host.read = read
    return True


def given_memory(groups):
    """Results go where the caller says; a wrong place is named before anything moves."""
    group, size = groups.world, groups.topology.world
    for rows in (3, 40_000):
        x = torch.full((rows, 2), float(group.rank))
        out = torch.full((size * rows, 2), -7.0)
        assert collectives.all_gather_rows(x, group, stage="gather", out=out) is out
        assert [float(part.mean()) for part in out.split(rows)] == list(range(size))
        y, back = x.repeat(size, 1), torch.full((size * rows, 2), -7.0)
        counts = [rows] * size
        assert collectives.exchange_rows(y, group, counts, counts, stage="exchange", out=back) is back
        assert same_bits(back, out)
        total, wanted = torch.full((rows, 2), -7.0), size * (size - 1) / 2
        assert collectives.reduce_scatter_rows(y, group, stage="sum", out=total) is total
        assert collectives.all_reduce_rows(x, group, stage="all", out=x.clone()).eq(wanted).all()
        assert total.eq(wanted).all()
    said = []
    for wrong in (torch.zeros(1, 2), torch.zeros(2 * size, 3).t(), torch.zeros(3 * size, 2).double()):
        try:
            collectives.all_gather_rows(torch.zeros(3, 2), group, stage="gather", out=wrong)
        except ValueError as problem:
            said.append(str(problem))
    return len(said) == 3 and all("allowed: torch.float32" in text for text in said)


def broadcasts(groups):
    group = groups.world
    for size in (1, local.INLINE_BYTES, local.INLINE_BYTES + 1, 3 << 20):
        for source in range(group.size):
            data = random_bytes(size, source).numpy().tobytes()
            own = data if group.rank == source else None
            assert collectives.broadcast_bytes(own, group, source, length=size, stage="b") == data
    return True


def traces_left(groups):
    """[named sockets in the folder, its mode, whose pages are there]."""
    folder = groups.world.control.host.folder
    names = sorted(path.name for path in folder.iterdir())
    return [[n for n in names if n.endswith(".socket")], stat.S_IMODE(folder.stat().st_mode), names]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_gathers_at_every_border(ranks, world):
    assert ranks.run(Topology(world, 1, world), "test_local:gathers") == [True] * world


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_exchanges_at_every_border(ranks, world, reads):
    answers = ranks.run(Topology(world, 1, world), "test_local:exchanges", reads=reads)
    assert len(set(answers)) == 1


@pytest.mark.parametrize("transport", ["local", "torch"])
@pytest.mark.parametrize("world", [2, 4])
def test_buffers_may_be_overwritten_at_once(ranks, world, transport):
    topology, epochs = Topology(world, 1, world), 200 if transport == "local" else 40
    done = ranks.run(topology, "test_local:reused_buffers", transport=transport, epochs=epochs)
    assert done == [True] * world


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("world", [2, 3])
def test_reductions_add_in_rank_order(ranks, world, reads):
    assert ranks.run(Topology(world, 1, world), "test_local:reductions", reads=reads) == [True] * world


def test_reductions_over_the_backend(ranks):
    answers = ranks.run(Topology(3, 1, 3), "test_local:reductions", transport="torch", reads=True)
    assert answers == [True] * 3


def test_results_go_where_the_caller_says(ranks):
    assert ranks.run_both(Topology(3, 1, 3), "test_local:given_memory") == [True] * 3


def test_broadcasts(ranks):
    assert ranks.run(Topology(3, 1, 3), "test_local:broadcasts") == [True] * 3


def test_sockets_have_lost_their_names_and_the_folder_is_private(ranks):
    pages = [f"rank-{rank}.control" for rank in range(2)]
    for sockets, mode, names in ranks.run(Topology(2, 1, 2), "test_local:traces_left"):
        assert sockets == [] and mode == 0o700 and names == pages


def test_a_group_of_one_reduces_to_itself():
    group = Groups.single().world
    x = torch.randn(4, 2)
    assert collectives.reduce_scatter_rows(x, group, stage="s") is x
    assert collectives.all_reduce_rows(x, group, stage="s") is x
    assert collectives.view_gathered_rows(x, group, stage="s") is x
    with pytest.raises(ValueError, match="floating point"):
        collectives.reduce_scatter_rows(torch.ones(2, dtype=torch.int64), group, stage="s")


def test_memory_that_cannot_be_had_is_told(monkeypatch):
    def full(descriptor, offset, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(window.NoRoom, match="shared memory"):
        window.make_memory(1 << 20)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_memory_without_memfd_has_no_name(monkeypatch):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    before = set(window.SHARED_FOLDER.iterdir())
    made = window.Window(window.make_memory(4096), 4096)
    assert set(window.SHARED_FOLDER.iterdir()) == before
    assert [made.next_epoch() - made.start, made.capacity] == [0, 4096]
    made.uses += 1
    assert made.next_epoch() - made.start == 4096
    made.uses += 1
    assert made.next_epoch() == made.start


def test_a_nonce_is_read_only_where_it_is():
    nonce = direct.Nonce()
    if direct.find_read() is None or not direct.can_read(os.getpid(), nonce.address, nonce.text):
        pytest.skip("this system lets no process read another's memory")
    assert not direct.can_read(os.getpid(), nonce.address, secrets.token_hex(direct.NONCE_BYTES))
    assert not direct.can_read(os.getpid(), 8, nonce.text)


def test_identity_is_boot_and_network_and_user(monkeypatch):
    own = connect.host_identity()
    assert own == connect.host_identity()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert connect.host_identity() != own


def _callers(folder, words):
    """Connections to rank 0's socket that say these words."""
    path = folder / "0.socket"
    for _ in range(1000):
        if path.exists():
            break
        time.sleep(0.005)
    links = []
    for word in words:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.connect(str(path))
        link.send(word)
        links.append(link)
    return links


def test_a_stranger_without_the_token_is_turned_away(tmp_path):
    """Another process of the user which finds the socket's name in time is no rank."""

    class Store:
        def __init__(self):
            self.values = {}

        def set(self, key, value):
            self.values[key] = value

        def wait(self, keys, timeout):
            assert all(key in self.values for key in keys)

        def get(self, key):
            return self.values[key].encode()

    store = Store()
    meeting = connect._Meeting(store, 0, (0, 1), 10.0)
    token = secrets.token_bytes(connect.TOKEN_BYTES)
    store.set("token", token.hex())
    words = [b"x" * connect.TOKEN_BYTES + b"1", token + b"one", token + b"1"]
    links = []
    caller = threading.Thread(target=lambda: links.extend(_callers(tmp_path, words)))
    caller.start()
    found = meeting.links(tmp_path)
    caller.join()
    assert list(found) == [1]
    found[1].setblocking(True)
    found[1].send(b"hello")
    assert links[2].recv(10) == b"hello" and links[0].recv(10) == b"" and links[1].recv(10) == b""
    assert list(tmp_path.iterdir()) == []
    for link in [*links, *found.values()]:
        link.close()


def test_folders_of_dead_jobs_are_swept_and_others_stay(tmp_path):
    folders = {}
    for name, pid in (("dead", 2**22 - 3), ("alive", os.getpid())):
        folder = tmp_path / f"{connect.FOLDER_PREFIX}{name}"
        folder.mkdir()
        control_page.ControlPage(control_page.page_path(folder, 0), 0).close()
        path = control_page.page_path(folder, 0)
        data = bytearray(path.read_bytes())
        data[12:16] = pid.to_bytes(4, "little")
        path.write_bytes(bytes(data))
        os.utime(folder, (1, 1))
        folders[name] = folder
    (tmp_path / "mine").mkdir()
    connect.sweep(tmp_path)
    assert not folders["dead"].exists() and folders["alive"].exists() and (tmp_path / "mine").exists()


def test_control_pages_keep_the_latest_calls_and_refuse_other_files(tmp_path):
    page = control_page.ControlPage(control_page.page_path(tmp_path, 3), 3)
    for number in range(control_page.RECORDS + 5):
        page.enter(f"gather number {number} of group tp, stage \u20ac" + "x" * 500)
        page.leave()
    page.enter("the last")
    found = control_page.read_page(page.path, latest=3)
    assert (found.rank, found.pid, found.calls, found.inside) == (3, os.getpid(), control_page.RECORDS + 6, True)
    assert found.notes[-1] == "the last" and f"number {control_page.RECORDS + 4} of" in found.notes[-2]
    assert len(control_page.read_page(page.path, latest=10_000).notes) == control_page.RECORDS
    assert "inside the last" in found.told()
    for damage in (b"", b"short", b"x" * control_page.PAGE_BYTES):
        (tmp_path / "rank-9.control").write_bytes(damage)
        with pytest.raises(ValueError, match="no control page"):
            control_page.read_page(tmp_path / "rank-9.control")
    (tmp_path / "link.control").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="link"):
        control_page.ControlPage(tmp_path / "link.control", 0)


def not_local(groups, why):
    """Ranks that cannot share memory: auto stays on torch and says why, local is an error on all."""
    store, rank, topology = groups.store, groups.rank, groups.topology
    groups.close()
    real = connect.host_identity, connect.make_memory
    if why == "hosts":
        connect.host_identity = lambda: f"host {rank % 2}"
    elif rank == 1:
        connect.make_memory = _no_room
    try:
        auto = Connections(Wish())
        made = Groups.start(topology, rank=rank, backend="gloo", timeout=20.0, store=store, connections=auto)
        group = made.world
        told = [group.transport, group.check, auto.note, made.tp.transport]
        gathered = collectives.all_gather_rows(torch.full((1, 1), rank), group, stage="s").flatten().tolist()
        made.close()
        try:
            Groups.start(
                topology, rank=rank, backend="gloo", timeout=20.0, store=store, connections=Connections(Wish("local"))
            )
        except TransportError as problem:
            said = str(problem)
    finally:
        connect.host_identity, connect.make_memory = real
    return json.dumps([told, gathered, said])


def sampled(groups):
    """Ranks that no doorbell joins: which calls are compared, and what a difference in one of those gives."""
    store, rank, topology = groups.store, groups.rank, groups.topology
    groups.close()
    real, connect.host_identity = connect.host_identity, lambda: f"host {rank}"
    try:
        made = Groups.start(
            topology, rank=rank, backend="gloo", timeout=20.0, store=store, connections=Connections(Wish())
        )
    finally:
        connect.host_identity = real
    group, compared = made.world, []
    check = group.control.check

    def noted(call):
        compared.append(call.sequence)
        check(call)

    group.control.check = noted
    for _ in range(2 * backend.SAMPLE_EVERY):
        collectives.all_gather_rows(torch.zeros(1, 1), group, stage="alike")
    try:
        collectives.all_gather_rows(torch.zeros(1 + rank, 1), group, stage="differ")
    except CollectiveMismatch as problem:
        said = str(problem)
    made.close()
    return [compared, said]


def test_one_call_in_so_many_is_compared_where_no_doorbell_reaches():
    """gloo would abort a rank whose peer sends more than it awaits."""
    pool = RankPool(2, 20.0)
    try:
        answers = pool.run(Topology(2, 1, 2), "test_local:sampled", timeout=60)
    finally:
        pool.kill()
    for compared, said in answers:
        assert compared == [1, 1 + backend.SAMPLE_EVERY, 1 + 2 * backend.SAMPLE_EVERY]
        assert "ranks differ" in said and "rows" in said and "rank 1" in said


def _no_room(capacity):
    raise window.NoRoom(28, "2 bytes of shared memory: No space left on device")


@pytest.mark.parametrize(
    ("why", "note"), [("hosts", "no other rank is on this host"), ("memory", "rank 1: [Errno 28] 2 bytes of shared")]
)
def test_where_memory_cannot_be_shared_ranks_stay_on_torch_and_say_so(why, note):
    pool = RankPool(2, 20.0)
    try:
        answers = pool.run(Topology(2, 1, 2), "test_local:not_local", timeout=60, why=why)
    finally:
        pool.kill()
    for answer in map(json.loads, answers):
        (transport, check, found, tp_transport), gathered, said = answer
        assert (transport, check, tp_transport) == ("torch", "sampled", "torch")
        assert note in found and gathered == [0, 1]
        assert "--transport local is not to be had" in said
