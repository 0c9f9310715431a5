"""Ranks ended from outside say where they stood and leave nothing; what a kill leaves, the next start sweeps."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from meshspark.comm.connect import FOLDER_PREFIX

HERE = Path(__file__).parent
PATIENCE = 100.0
"""Bounds a hang on a busy machine; nothing here is meant to take long."""
PLACES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Ends what a test has started."""
    with ExitStack() as opened:
        yield opened


def start(folder: Path, stack: ExitStack, *words: str, prefix: tuple[str, ...] = (), **more: str) -> subprocess.Popen:
    """`python [prefix] -m launch_jobs words`, whose temporary files lie in `folder`."""
    kept = {name: value for name, value in os.environ.items() if name not in PLACES}
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    kept |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder), **more}
    command = [sys.executable, *prefix, "-m", "launch_jobs", *words]
    process = subprocess.Popen(command, text=True, env=kept, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    stack.callback(process.kill)
    return process


def two_by_hand(folder: Path, stack: ExitStack, *words: str) -> list[subprocess.Popen]:
    """Two ranks as another launcher than torchrun would start them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    place["GLOO_SOCKET_IFNAME"] = "lo"
    return [start(folder, stack, *words, RANK=str(rank), LOCAL_RANK=str(rank), **place) for rank in range(2)]


def looping(process: subprocess.Popen) -> None:
    """Wait until rank 0 has told of the first exchange."""
    assert "rows [0, 1]" in process.stdout.readline(), process.communicate(timeout=PATIENCE)


def said(process: subprocess.Popen) -> str:
    return process.communicate(timeout=PATIENCE)[1]


def pages(folder: Path) -> list[Path]:
    return list(folder.glob(f"{FOLDER_PREFIX}*"))


@pytest.mark.parametrize("transport", [pytest.param("local", marks=pytest.mark.slow), "torch"])
def test_a_rank_that_is_told_to_end_says_where_it_stands_while_it_waits(tmp_path, stack, transport):
    """Rank 1 is stopped, so that rank 0 waits, with `torch` inside the backend, when SIGTERM comes."""
    words = ("loop", "--tp", "2", "--timeout", "60", "--transport", transport)
    first, second = two_by_hand(tmp_path, stack, *words)
    looping(first)
    assert pages(tmp_path)
    second.send_signal(signal.SIGSTOP)
    time.sleep(0.5)
    begin = time.monotonic()
    first.terminate()
    text = said(first)
    assert first.returncode == 143 and time.monotonic() - begin < 30, text
    assert "meshspark: rank 0 ended: it was told to by SIGTERM; rank 0 (process" in text, text
    assert "stands inside" in text and "stage loop" in text, text
    assert not pages(tmp_path)
    second.terminate()
    second.send_signal(signal.SIGCONT)
    assert "rank 1" in said(second) and second.returncode in (1, 143)


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.parametrize(
    ("prefix", "words"),
    [pytest.param(TORCHRUN, (), marks=pytest.mark.slow), ((), ("--ranks", "2"))],
    ids=["torchrun", "ours"],
)
def test_ranks_whose_launcher_is_killed_leave_nothing(tmp_path, stack, prefix, words):
    """Our own launcher's folder is removed too: nobody else is left to do it. Under torchrun a rank says so."""
    job = start(tmp_path, stack, "loop", *words, prefix=prefix)
    looping(job)
    assert list(tmp_path.glob("meshspark-*"))
    job.kill()
    text = said(job)
    limit = time.monotonic() + PATIENCE
    while list(tmp_path.glob("meshspark-*")) and time.monotonic() < limit:
        time.sleep(0.1)
    assert not list(tmp_path.glob("meshspark-*"))
    assert not prefix or "ended: its launcher has gone" in text, text


def test_an_interrupted_rank_leaves_nothing(tmp_path, stack):
    first, second = two_by_hand(tmp_path, stack, "loop", "--tp", "2")
    looping(first)
    first.send_signal(signal.SIGINT)
    assert "interrupted" in said(first) and first.returncode == 130
    assert "rank 0" in said(second) and second.returncode == 1
    assert not pages(tmp_path)


def test_what_killed_ranks_leave_is_swept_by_the_next_start(tmp_path, stack):
    jobs = two_by_hand(tmp_path, stack, "loop", "--tp", "2")
    looping(jobs[0])
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for job in jobs:
            job.send_signal(number)
    for job in jobs:
        job.communicate(timeout=PATIENCE)
    (left,) = pages(tmp_path)
    # A younger folder may be another job's that has no page yet.
    os.utime(left, (1, 1))
    done = two_by_hand(tmp_path, stack, "fine", "--tp", "2")
    errors = [said(job) for job in done]
    assert [job.returncode for job in done] == [0, 0], errors
    assert not pages(tmp_path)
