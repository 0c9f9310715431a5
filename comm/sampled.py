"""The check of groups that no doorbell reaches: devices, and ranks on several hosts."""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from ..parallel.errors import CollectiveMismatch, CommError, error_kind, first_line
from ..parallel.group import Call, Control, Group
from .signatures import HEAD, STAGE_BYTES, Ring, disagreement, ring_head

HEAD_LIMIT = HEAD.size + 160 + STAGE_BYTES


class SideChannel:
    """Compares calls over a gloo group of the same ranks, and says who may be gone when the backend gave up.

    side: None where the group itself is on gloo. near: what knows the ranks of this host, if they are connected.
    far: ranks of the group on other hosts -> their host's name.
    """

    def __init__(self, side: dist.ProcessGroup | None, near: Control | None, far: Mapping[int, str]) -> None:
        self.side, self.near, self.far = side, near, far

    def enter(self, group: Group, told: str) -> None:
        """Note the call."""
        if self.near is not None:
            self.near.enter(group, told)

    def leave(self) -> None:
        """Note its end."""
        if self.near is not None:
            self.near.leave()

    def explain(self, call: Call, problem: Exception) -> CommError | None:
        """A rank of this host whose end broke the call; else the ranks of other hosts, if there are any."""
        known = self.near.explain(call, problem) if self.near is not None else None
        if known is not None or not self.far:
            return known
        names = dict.fromkeys(self.far.values())
        hosts = [f"ranks {[r for r, name in self.far.items() if name == host]} on host {host}" for host in names]
        text = f"{', '.join(hosts)} are gone, late or out of reach: {first_line(problem)}"
        return call.error(error_kind(str(problem)), text, list(self.far))

    def check(self, call: Call) -> None:
        """Compare a call with all ranks; CollectiveMismatch on every one before data moves."""
        group = call.group
        head = ring_head(call)
        size = HEAD_LIMIT + 16 * group.size
        own = torch.frombuffer(bytearray(head.ljust(size, b"\0")), dtype=torch.uint8)
        heard = [torch.empty_like(own) for _ in group.ranks]
        dist.all_gather(heard, own, group=self.side or group.process_group)
        trouble = disagreement([Ring.parse(row.numpy().tobytes()) for row in heard], group.ranks)
        if trouble:
            raise call.error(CollectiveMismatch, trouble)
