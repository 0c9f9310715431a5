"""Two hosts in one: network namespaces with a name and an address of their own, joined by one link that can be cut."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PREFIX = "meshspark"
LINK = "wire0"
RETRIES = 15
"""Linux's own: about a quarter of an hour."""
ETC = Path("/etc/netns")
"""`ip netns exec` lays the files of ETC/NAME over those of /etc: each host has its own table of names."""
SECONDS = 10.0
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Host:
    """One host: its name, which is also that of its namespace, and the address that the others know it by."""

    name: str
    address: str

    def command(self, *words: str) -> list[str]:
        """The command line that runs `words` on this host, under its name."""
        # A UTS namespace of its own lets programs that ask for the machine's name see this host's.
        name_it = f'hostname {self.name} && exec "$@"'
        return ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", name_it, "sh", *words]

    def start(self, *words: str, **environment: str) -> "Running":
        """Start `words` here; its output goes to files, for a full pipe would hold it up."""
        kept = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
        kept.pop("GLOO_SOCKET_IFNAME", None)
        out, err = (tempfile.TemporaryFile("w+") for _ in range(2))  # noqa: SIM115
        process = subprocess.Popen(
            self.command(*words),
            env={**kept, "OMP_NUM_THREADS": "1", **environment},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        return Running(self, process, out, err, time.monotonic())

    def give_up_after(self, retries: int = RETRIES) -> None:
        """Let this host's TCP take a peer that answers nothing for dead after so many retries."""
        _ip("netns", "exec", self.name, "sh", "-c", f"echo {retries} > /proc/sys/net/ipv4/tcp_retries2")

    def pids(self) -> list[int]:
        """The processes that live here."""
        done = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True)
        return [int(word) for word in done.stdout.split()]

    def clear(self) -> list[int]:
        """Kill everything that lives here; what was found."""
        found = pids = self.pids()
        ends = time.monotonic() + SECONDS
        while pids and time.monotonic() < ends:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
            pids = self.pids()
        return found


@dataclass(eq=False)
class Running:
    """A command on a host."""

    host: Host
    process: subprocess.Popen
    out: object
    err: object
    started: float

    def wait(self, within: float) -> int:
        """Its exit code. TimeoutExpired after `within` seconds."""
        return self.process.wait(within)

    @property
    def stdout(self) -> str:
        return _read(self.out)

    @property
    def stderr(self) -> str:
        return _read(self.err)


@dataclass(frozen=True)
class Hosts:
    """Both hosts and the link between them."""

    first: Host
    second: Host

    def __iter__(self) -> Iterator[Host]:
        return iter((self.first, self.second))

    def cut(self) -> None:
        """Take the link down: nothing arrives any more, and nobody is told."""
        _ip("-n", self.first.name, "link", "set", LINK, "down")

    def mend(self) -> None:
        """Bring the link up again and end what still runs."""
        for host in self:
            host.clear()
            host.give_up_after()
            _ip("-n", host.name, "link", "set", LINK, "up")


def why_not() -> str:
    """Why hosts cannot be made here; empty where they can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces exist on Linux alone"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    missing = [program for program in ("ip", "unshare", "hostname") if shutil.which(program) is None]
    if missing:
        return f"{missing} are not installed"
    try:
        with two_hosts():
            return ""
    except (subprocess.CalledProcessError, OSError) as problem:
        return f"network namespaces cannot be made here: {getattr(problem, 'stderr', None) or problem}"


@contextmanager
def two_hosts(network: str = "10.213.77") -> Iterator[Hosts]:
    """Two hosts that reach each other and nothing else; gone, with all that runs there, when the body ends."""
    _remove_left()
    hosts = Hosts(*(Host(f"{PREFIX}-{os.getpid()}-{letter}", f"{network}.{i}") for i, letter in enumerate("ab", 1)))
    try:
        _make(hosts)
        yield hosts
    finally:
        for host in hosts:
            _remove(host)


def _make(hosts: Hosts) -> None:
    table = "".join(f"{host.address} {host.name}\n" for host in hosts)
    for host in hosts:
        _ip("netns", "add", host.name)
        (ETC / host.name).mkdir(parents=True, exist_ok=True)
        (ETC / host.name / "hosts").write_text(f"127.0.0.1 localhost\n{table}")
    first, second = (host.name for host in hosts)
    _ip("link", "add", LINK, "netns", first, "type", "veth", "peer", "name", LINK, "netns", second)
    for host in hosts:
        _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", LINK)
        for device in ("lo", LINK):
            _ip("-n", host.name, "link", "set", device, "up")


def _remove(host: Host) -> None:
    host.clear()
    # The link goes with the namespace; a host that was never made is no fault.
    subprocess.run(["ip", "netns", "delete", host.name], capture_output=True)
    shutil.rmtree(ETC / host.name, ignore_errors=True)
    with suppress(OSError):
        ETC.rmdir()


def _remove_left() -> None:
    """Hosts of a test run that was killed before it could remove them."""
    for path in Path("/run/netns").glob(f"{PREFIX}-*-?"):
        owner = path.name.split("-")[1]
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            _remove(Host(path.name, ""))


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def _read(file: object) -> str:
    file.seek(0)
    return file.read()
