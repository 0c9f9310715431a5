"""Two hosts: torchrun over a network, the link cut in the middle, a host that is late or never comes."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hosts import Host, Hosts, Running, two_hosts, why_not

HERE = Path(__file__).parent
PATIENCE = 150.0
"""Bounds a hang on a busy machine; nothing here is meant to take long."""
GRACE = 25.0
"""What may pass beyond a time-out until both launchers have ended: start and end of processes on a busy machine."""
SECONDS = 5
"""The time-out of ranks that are to meet it."""
GIVE_UP = 20.0
"""What TCP may take to give up after 5 retries: 12.6 s where answers come at once, more on a busy machine."""
PORT = 29400
PROMPT = ("--prompt", "class Reader", "--max-new-tokens", "8")


@pytest.fixture(scope="module")
def made() -> Iterator[Hosts]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with two_hosts() as hosts:
        yield hosts


@pytest.fixture
def hosts(made: Hosts) -> Iterator[Hosts]:
    """Both hosts, linked; afterwards nothing may run there that a test has not ended itself."""
    yield made
    made.mend()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where both hosts keep their temporary files; nothing of ours may be left there."""
    path = tmp_path / "temporary"
    path.mkdir()
    yield path
    left = [item.name for item in path.rglob("meshspark*")]
    assert not left, f"files are left: {left}"


def torchrun(host: Host, hosts: Hosts, folder: Path, *words: str, **environment: str) -> Running:
    """Two of four ranks on `host`, which meet the others at the first one's port, as the documentation says."""
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts.first.name}:{PORT}", "--rdzv-id", "job"]
    return _torchrun(host, meeting, folder, *words, **environment)


def torchrun_numbered(host: Host, hosts: Hosts, folder: Path, *words: str, **environment: str) -> Running:
    """The same where each host knows its number."""
    node = str(tuple(hosts).index(host))
    meeting = ["--node-rank", node, "--master-addr", hosts.first.name, "--master-port", str(PORT + 1)]
    return _torchrun(host, meeting, folder, *words, **environment)


def _torchrun(host: Host, meeting: list[str], folder: Path, *words: str, **environment: str) -> Running:
    start = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", *meeting]
    return host.start(*start, "-m", *words, PYTHONPATH=_path(), TMPDIR=str(folder), **environment)


def _path() -> str:
    """Where the jobs of these tests are found, before what the user has set."""
    return os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])


def by_hand(host: Host, hosts: Hosts, folder: Path, local_rank: int, *words: str) -> Running:
    """One of four ranks, as another launcher than torchrun would start it."""
    rank = 2 * tuple(hosts).index(host) + local_rank
    place = {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": "2"}
    place |= {"MASTER_ADDR": hosts.first.name, "MASTER_PORT": str(PORT + 2)}
    return host.start(sys.executable, "-m", *words, PYTHONPATH=_path(), TMPDIR=str(folder), **place)


def ends(jobs: list[Running], within: float = PATIENCE) -> list[int]:
    """Exit codes; after it no process is left on any host."""
    limit = time.monotonic() + within
    codes = [job.wait(max(0.1, limit - time.monotonic())) for job in jobs]
    while any(job.host.pids() for job in jobs) and time.monotonic() < limit:
        time.sleep(0.1)
    left = {job.host.name: job.host.pids() for job in jobs if job.host.pids()}
    assert not left, f"processes are left: {left}"
    return codes


def messages(job: Running) -> str:
    """What our ranks said there."""
    return "\n".join(line for line in job.stderr.splitlines() if line.startswith("meshspark:"))


def looping(jobs: list[Running]) -> None:
    """Wait until the ranks have made their first exchange, of which rank 0 tells."""
    limit = time.monotonic() + PATIENCE
    while not any("rows [0, 1, 2, 3]" in job.stdout for job in jobs):
        assert time.monotonic() < limit and all(job.process.poll() is None for job in jobs), jobs[0].stderr
        time.sleep(0.1)


def text_of(*outputs: str) -> str:
    """What was generated, before the tables. World rank 0 may be on any host."""
    return "".join(output.split("\nranks")[0].split("\nworld")[0] for output in outputs).strip()


def test_both_hosts_write_what_one_rank_writes_though_one_is_late(hosts: Hosts, folder: Path) -> None:
    words = ("meshspark.launch.generate", "--tp", "2", "--ep", "4", *PROMPT)
    first = torchrun(hosts.first, hosts, folder, *words)
    alone = hosts.second.start(sys.executable, "-m", "meshspark.launch.generate", *PROMPT, PYTHONPATH=_path())
    time.sleep(5.0)
    assert alone.wait(PATIENCE) == 0, alone.stderr
    second = torchrun(hosts.second, hosts, folder, *words)
    assert ends([first, second]) == [0, 0], first.stderr + second.stderr
    assert text_of(alone.stdout).startswith("class Reader")
    assert text_of(first.stdout, second.stdout) == text_of(alone.stdout)


def test_a_fixture_passes_across_hosts(hosts: Hosts, folder: Path) -> None:
    """The context group of this topology lies on both hosts, so that its payloads cross the network."""
    words = ("meshspark.launch.fixture", "run", "cp-allgather", "--payload-kind", "csa-aux", "--raw-bits")
    jobs = [torchrun(host, hosts, folder, *words, "--local-t", "17", "--tp", "4", "--ep", "4") for host in hosts]
    assert ends(jobs) == [0, 0], jobs[0].stderr + jobs[1].stderr
    said = "".join(job.stdout for job in jobs)
    assert "cp-allgather: passed" in said and "transport torch" in said, said
    # The two ranks of a host are connected all the same: they have pages, and name each other when one dies.
    assert "note: control pages are in" in jobs[0].stderr + jobs[1].stderr


def test_a_cut_link_ends_both_sides_and_each_names_the_other(hosts: Hosts, folder: Path) -> None:
    # torchrun's own process waits for its store as long as TCP does: the hosts give up after seconds, not minutes. It
    # then ends its ranks, of whom this test wants to hear what they say of themselves: well beyond SECONDS.
    for host in hosts:
        host.give_up_after(retries=5)
    cut_in_the_middle([_loop(torchrun, host, hosts, folder) for host in hosts], hosts)


@pytest.mark.slow
def test_a_cut_link_where_each_host_knows_its_number(hosts: Hosts, folder: Path) -> None:
    """No store is asked here once all have met, so that no setting of the system is needed."""
    jobs = [_loop(torchrun_numbered, host, hosts, folder) for host in hosts]
    cut_in_the_middle(jobs, hosts)


def _loop(start: Callable[..., Running], host: Host, hosts: Hosts, folder: Path) -> Running:
    return start(host, hosts, folder, "launch_jobs", "loop", "--tp", "2", "--timeout", str(SECONDS))


def cut_in_the_middle(jobs: list[Running], hosts: Hosts) -> None:
    """Both sides end soon after their time is up, and each says which host it cannot reach, and with which ranks."""
    looping(jobs)
    hosts.cut()
    assert ends(jobs, GIVE_UP + GRACE) == [1, 1]
    for job, other in zip(jobs, reversed(jobs), strict=True):
        said = messages(job)
        assert "stage loop" in said and f"on host {other.host.name}" in said, said
        assert f"on host {job.host.name}" not in said, said


def test_a_host_that_cannot_start_says_why_and_the_other_names_its_ranks(hosts: Hosts, folder: Path) -> None:
    words = ("launch_jobs", "fine", "--tp", "2", "--timeout", str(SECONDS))
    first = torchrun_numbered(hosts.first, hosts, folder, *words)
    second = torchrun_numbered(hosts.second, hosts, folder, *words, GLOO_SOCKET_IFNAME="nosuch0")
    assert ends([first, second], SECONDS + GRACE) == [1, 1]
    assert "GLOO_SOCKET_IFNAME is 'nosuch0'" in messages(second) and "'wire0'" in messages(second), second.stderr
    assert f"ranks [2, 3] have not started within {SECONDS} s" in messages(first), first.stderr


@pytest.mark.slow
def test_a_host_that_never_comes_is_named(hosts: Hosts, folder: Path) -> None:
    """torchrun starts no rank before all hosts are there; other launchers do."""
    words = ("launch_jobs", "fine", "--tp", "2", "--timeout", str(SECONDS))
    jobs = [by_hand(hosts.first, hosts, folder, local_rank, *words) for local_rank in range(2)]
    assert ends(jobs, SECONDS + GRACE) == [1, 1]
    for job in jobs:
        assert f"ranks [2, 3] have not started within {SECONDS} s" in messages(job), job.stderr


@pytest.mark.slow
def test_an_interface_that_leads_nowhere_is_named_on_both_sides(hosts: Hosts, folder: Path) -> None:
    """The loopback interface is there, but no other host is behind it: found before a backend starts."""
    words = ("launch_jobs", "fine", "--tp", "2", "--timeout", "60")
    where = {hosts.first: {}, hosts.second: {"GLOO_SOCKET_IFNAME": "lo"}}
    jobs = [torchrun_numbered(host, hosts, folder, *words, **more) for host, more in where.items()]
    assert ends(jobs) == [1, 1]
    for job in jobs:
        assert "set GLOO_SOCKET_IFNAME" in messages(job), job.stderr
        assert f"on host {hosts.second.name}: GLOO_SOCKET_IFNAME is 'lo'" in messages(job), job.stderr


@pytest.mark.slow
def test_hosts_differ_and_their_processes_do_not(hosts: Hosts) -> None:
    """Two network namespaces of one machine share its boot."""
    ask = (sys.executable, "-c", "from meshspark.comm.connect import host_identity; print(host_identity())")
    jobs = [host.start(*ask, PYTHONPATH=_path()) for host in (hosts.first, hosts.first, hosts.second)]
    assert ends(jobs) == [0, 0, 0], jobs[0].stderr
    here, again, there = (job.stdout for job in jobs)
    assert here == again != there
    assert here.split()[0] == there.split()[0]
