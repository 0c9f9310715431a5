"""Starting and ending ranks: exit codes, one message with rank and stage, nothing left behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from meshspark.launch import diagnose, exchange, spawn, worker
from meshspark.launch.flags import DeviceChoice, FlagError, RunFlags
from meshspark.parallel.errors import CollectiveMismatch, CollectiveTimeout, RankDied, TransportError
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

HERE = Path(__file__).parent
PATIENCE = 150.0
"""Bounds a hang on a busy machine; nothing here is meant to take long."""


def _environment(**more):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return {**kept, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1", **more}


def _run(*arguments, **more):
    command = [sys.executable, "-m", "launch_jobs", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=_environment(**more))


def _started(pids, ranks, process):
    """Process ids by rank, once all have written theirs."""
    ends = time.monotonic() + PATIENCE
    while time.monotonic() < ends and process.poll() is None:
        found = {path.name: path.read_text() for path in pids.iterdir()}
        if len(found) == ranks and all(found.values()):
            return {int(rank): int(pid) for rank, pid in found.items()}
        time.sleep(0.05)
    raise AssertionError(f"ranks did not start: {process.communicate()}")


def _gone(pid, within=10.0):
    ends = time.monotonic() + within
    while time.monotonic() < ends:
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


def _loop(pids, stack, *prefix):
    command = [*(prefix or (sys.executable, "-m", "launch_jobs")), "loop", "--pids", str(pids)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, env=_environment(), **pipes)
    stack.callback(process.kill)
    return process


def _notes_only(text):
    """Whether standard error holds nothing but notes."""
    return all(line.startswith("note: ") for line in text.splitlines())


def _messages(stderr):
    return [line for line in stderr.splitlines() if line.startswith("meshspark")]


def test_a_port_that_others_have_taken_does_not_matter():
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", 29500))
            taken.listen()
        except OSError:
            pass  # somebody else has it: as good
        done = _run("fine", "--ranks", "2")
    assert (done.returncode, done.stdout) == (0, "rows [0, 1] tp 1 ep 2\n"), done.stderr
    assert _notes_only(done.stderr)


def test_an_exception_ends_all_ranks_with_one_message():
    done = _run("raise", "--ranks", "2", "--timeout", "100")
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if not line.startswith("note: ")]
    assert lines == ["meshspark: rank 1 failed in stage brew: ValueError: no more tea"]


@pytest.mark.parametrize("optimize", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_ranks_that_disagree_say_so_once(optimize):
    """Also where asserts are off: no check of what a user gives leans on one."""
    more = {} if optimize == "0" else {"PYTHONOPTIMIZE": optimize}
    done = _run("differ", "--ranks", "2", "--timeout", "100", **more)
    assert done.returncode == 1
    assert len(_messages(done.stderr)) == 1
    assert "fact place" in done.stderr and "rank 1" in done.stderr


def test_a_killed_rank_is_named_and_the_others_end(tmp_path):
    with ExitStack() as stack:
        process = _loop(tmp_path, stack, sys.executable, "-m", "launch_jobs", "--ranks", "2", "--timeout", "100")
        pids = _started(tmp_path, 2, process)
        os.kill(pids[1], signal.SIGKILL)
        _, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert _messages(stderr)[0].startswith("meshspark: rank 1 was killed by SIGKILL")
    assert len(_messages(stderr)) == 1
    assert all(_gone(pid) for pid in pids.values())


def test_a_stopped_rank_is_named_and_all_end(tmp_path):
    """Asleep it could not take the launcher's signal, which would wait for half a minute."""
    with ExitStack() as stack:
        process = _loop(tmp_path, stack, sys.executable, "-m", "launch_jobs", "--ranks", "3", "--timeout", "2")
        pids = _started(tmp_path, 3, process)
        os.kill(pids[1], signal.SIGSTOP)
        begin = time.monotonic()
        _, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1 and time.monotonic() - begin < 20.0
    (message,) = _messages(stderr)
    assert "CollectiveTimeout" in message and "ranks [1] have not come within 2 s; rank 1 (process" in message
    assert all(_gone(pid) for pid in pids.values())


def test_diagnose_reads_where_ranks_stand_from_outside(tmp_path, capsys):
    """Rank 1 is stopped in the middle: its page says after which call, and its state says so."""
    pages = tmp_path / "pages"
    with ExitStack() as stack:
        ranks = ("--ranks", "2", "--timeout", "30", "--control", str(pages))
        (tmp_path / "pids").mkdir()
        process = _loop(tmp_path / "pids", stack, sys.executable, "-m", "launch_jobs", *ranks)
        pids = _started(tmp_path / "pids", 2, process)
        time.sleep(0.5)
        os.kill(pids[1], signal.SIGSTOP)
        time.sleep(1.0)
        assert diagnose.main([str(pages), "--json"]) == 0
        told = capsys.readouterr()
        os.kill(pids[1], signal.SIGCONT)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE)
    first, second = json.loads(told.out)["ranks"]
    assert (first["rank"], second["rank"]) == (0, 1) and second["state"] == "stopped" and second["pid"] == pids[1]
    assert first["inside"] and first["seconds"] > 0.5 and "stage loop" in first["notes"][-1]
    assert first["calls"] - second["calls"] in (0, 1)
    assert diagnose.main([str(tmp_path / "nothing")]) == 2
    assert "holds no control pages" in capsys.readouterr().err


@pytest.mark.parametrize(
    "number, code", [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_signal_to_the_launcher_ends_all_ranks(tmp_path, number, code):
    with ExitStack() as stack:
        process = _loop(tmp_path, stack, sys.executable, "-m", "launch_jobs", "--ranks", "2")
        pids = _started(tmp_path, 2, process)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, stderr
    # Python itself may add a note when the signal comes in the middle of a finalizer.
    assert _messages(stderr) == [f"meshspark: {number.name}: all 2 ranks ended"]
    assert all(_gone(pid) for pid in pids.values())


def _listening(pid):
    """Local addresses, as the kernel writes them, on which a process accepts TCP connections."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            inodes.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
    lines = [line for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]]
    fields = [line.split() for line in lines]
    return [field[1] for field in fields if field[3] == "0A" and field[9] in inodes]


LOOPBACK = ("0100007F:", "00000000000000000000000001000000:", "0000000000000000FFFF00000100007F:")


def test_ranks_listen_on_loopback_alone_and_end_when_the_launcher_is_killed(tmp_path):
    with ExitStack() as stack:
        process = _loop(tmp_path, stack, sys.executable, "-m", "launch_jobs", "--ranks", "2")
        pids = _started(tmp_path, 2, process)
        sockets = [address for pid in (process.pid, *pids.values()) for address in _listening(pid)]
        assert sockets and all(address.startswith(LOOPBACK) for address in sockets), sockets
        process.kill()
        process.wait()
        assert all(_gone(pid, PATIENCE) for pid in pids.values())


def test_wrong_flags_are_one_message_before_any_rank_starts():
    done = _run("fine", "--ranks", "4", "--tp", "3")
    assert done.returncode == 2
    assert _messages(done.stderr) == done.stderr.splitlines()
    assert "world % tp must be 0, but world is 4 and tp is 3; legal tp for world 4: [1, 2, 4]" in done.stderr


def test_an_interface_that_is_not_there_is_named_before_any_rank_starts():
    done = _run("fine", "--ranks", "2", GLOO_SOCKET_IFNAME="^lo,docker")
    assert done.returncode == 2
    assert "GLOO_SOCKET_IFNAME is '^lo,docker'" in done.stderr and "lo" in done.stderr


@pytest.mark.slow
def test_a_rank_that_leaves_or_dies_alone():
    done = _run("leave", "--ranks", "3", "--timeout", "100")
    assert done.returncode == 1 and "rank 2" in done.stderr and len(_messages(done.stderr)) == 1
    done = _run("leave-first", "--ranks", "3", "--timeout", "100")
    assert done.returncode == 1 and "rank 0" in done.stderr and len(_messages(done.stderr)) == 1
    done = _run("die", "--ranks", "3", "--timeout", "100")
    assert done.returncode == 1 and "rank 2 was killed by SIGKILL" in done.stderr


def _torchrun(*arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command += ["launch_jobs", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=_environment())


def test_torchrun_runs_the_same_job():
    done = _torchrun("fine", "--tp", "2")
    assert (done.returncode, done.stdout) == (0, "rows [0, 1] tp 2 ep 2\n"), done.stderr


@pytest.mark.slow
def test_torchrun_and_flags_that_disagree_are_one_message():
    done = _torchrun("fine", "--ranks", "2")
    assert done.returncode != 0
    assert len([m for m in _messages(done.stderr) if "--ranks is 2, but torchrun" in m]) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_start_ups_in_a_row():
    """No port, store or process of one start disturbs the next."""
    for number in range(20):
        done = _run("fine", "--ranks", "2", "--tp", "2")
        assert (done.returncode, done.stdout) == (0, "rows [0, 1] tp 2 ep 2\n"), f"start {number}: {done.stderr}"


@pytest.mark.slow
def test_four_jobs_at_once():
    command = [sys.executable, "-m", "launch_jobs", "fine", "--ranks", "2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    jobs = [subprocess.Popen(command, text=True, env=_environment(), **pipes) for _ in range(4)]
    try:
        ends = [job.communicate(timeout=PATIENCE) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [0] * 4, ends


RANKED = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("problem", "told"), [(FlagError("--tp is 0"), False), (ValueError("there is no checkpoint"), True)]
)
def test_a_wrong_use_is_told_once_if_all_ranks_find_it_and_by_each_that_may_be_alone(
    problem, told, tmp_path, monkeypatch, capsys
):
    """Rank 1 under torchrun: its error file is written in any case."""
    file = tmp_path / "error.json"
    for name, value in {**RANKED, "TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_ERROR_FILE": str(file)}.items():
        monkeypatch.setenv(name, value)

    def act(argv):
        raise problem

    assert worker.run_main("generate", act, []) == worker.USAGE
    assert f"generate: rank 1: {problem}" in json.loads(file.read_text())["message"]["message"]
    assert (str(problem) in capsys.readouterr().err) == told


def test_the_environment_is_a_place():
    place = worker.read_place({**RANKED, "LOCAL_WORLD_SIZE": "2"})
    assert place == worker.Place(rank=1, world=2, local_rank=1, local_world=2)
    assert worker.read_place({}) is None
    ours = worker.read_place({**RANKED, "TORCHELASTIC_RUN_ID": f"{worker.RUN_ID}1", "TORCHELASTIC_ERROR_FILE": "e"})
    assert ours.managed and ours.spoken_for and ours.error_file == "e"
    assert not worker.read_place({**RANKED, "TORCHELASTIC_RUN_ID": "theirs"}).spoken_for


@pytest.mark.parametrize("name", sorted(RANKED))
def test_a_missing_variable_is_named(name):
    with pytest.raises(ValueError, match=f"{name} is not set"):
        worker.read_place({key: value for key, value in RANKED.items() if key != name})


@pytest.mark.parametrize("change", [{"RANK": "2"}, {"RANK": "x"}, {"WORLD_SIZE": "0"}, {"LOCAL_RANK": "-1"}])
def test_a_wrong_variable_is_named(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        worker.read_place({**RANKED, **change})


def test_ranks_inherit_threads_and_loopback_only_where_the_user_is_silent(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with worker.environment_for_ranks(2, "lo"):
        assert os.environ["OMP_NUM_THREADS"] == "5" and os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.delenv("OMP_NUM_THREADS")
    with worker.environment_for_ranks(10**6, None):
        assert os.environ["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in os.environ


def test_devices_that_are_not_there_are_refused_by_local_rank():
    flags = RunFlags(Topology(2, 1, 2), "nccl", DeviceChoice("cuda", (5000, 5001)), 60.0, "float32", 0)
    with pytest.raises(ValueError, match="local rank 0 would use cuda:5000"):
        worker.check_machine(flags, 2)


def test_the_innermost_stage_is_remembered():
    with pytest.raises(ValueError) as caught, worker.named_stage("outer"), worker.named_stage("inner"):
        raise ValueError("x")
    assert worker.stage_of(caught.value) == "inner"
    with pytest.raises(RankDied) as died, worker.named_stage("outer"):
        raise RankDied("x", stage="dispatch")
    assert worker.stage_of(died.value) == "dispatch"


def _report(folder, rank, problem, seconds):
    path = folder / "run" / "attempt_0" / str(rank) / "error.json"
    path.parent.mkdir(parents=True)
    worker._write_error_file(path, f"rank {rank}: {problem.args[0]}", problem)
    text = path.read_text()
    now = spawn._reports(folder)[rank]["time"]
    path.write_text(text.replace(repr(now), repr(seconds)))


def test_the_root_cause_is_told_and_not_what_followed(tmp_path):
    _report(tmp_path, 0, RankDied("peer"), 1.0)
    assert spawn._explain({0: 1, 1: -9}, tmp_path)[0].startswith("rank 1 was killed by SIGKILL; then rank 0")
    assert spawn._explain({0: 1, 1: 3}, tmp_path)[0].startswith("rank 1 ended with exit code 3; then rank 0")
    _report(tmp_path, 1, ValueError("own"), 2.0)
    assert spawn._explain({0: 1, 1: -15}, tmp_path) == ("rank 1: own", 1)
    _report(tmp_path, 2, CollectiveMismatch("first"), 0.5)
    assert "first" in spawn._explain({0: 1}, tmp_path)[0]


def test_a_rank_that_left_or_was_terminated_or_was_stopped_is_named(tmp_path):
    died, slow = tmp_path / "died", tmp_path / "slow"
    _report(died, 0, RankDied("closed"), 1.0)
    assert spawn._explain({0: 1, 1: -15, 3: -15}, died, 4)[0].startswith("rank 2 ended before the others")
    assert spawn._explain({2: -15, 0: 1, 1: -15, 3: -15}, died, 4)[0].startswith("rank 2 was killed by SIGTERM; then")
    _report(slow, 0, CollectiveTimeout("CollectiveTimeout"), 1.0)
    assert spawn._explain({0: 1, 1: -9}, slow, 2)[0].startswith("rank 1 did not answer; then rank 0")
    assert spawn._explain({0: 1, 1: -15}, slow, 2)[0].startswith("rank 0: ")


def test_an_exchange_that_returns_zeros_is_found(monkeypatch):
    exchange.try_exchanges(Groups.single())
    monkeypatch.setattr(exchange, "exchange_rows", lambda x, *_, **__: x * 0)
    with pytest.raises(TransportError, match="exchange_rows"):
        exchange.try_exchanges(Groups.single())
