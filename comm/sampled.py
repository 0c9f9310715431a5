"""The check of groups that no doorbell reaches: devices, and ranks on several hosts."""

import torch
import torch.distributed as dist

from ..parallel.errors import CollectiveMismatch, CommError
from ..parallel.group import Call, Group
from .control_page import ControlPage
from .signatures import HEAD, STAGE_BYTES, Ring, disagreement, ring_head

SAMPLE_EVERY = 64
"""One call in so many is compared where the check is sampled: an exchange of gloo costs as much as a small call."""

HEAD_LIMIT = HEAD.size + 160 + STAGE_BYTES


class SideChannel:
    """Compares calls over a gloo group of the same ranks. page: where they are noted, if anywhere.

    side: None where the group itself is on gloo.
    """

    def __init__(self, side: dist.ProcessGroup | None, page: ControlPage | None) -> None:
        self.side, self.page = side, page

    def enter(self, group: Group, told: str) -> None:
        """Note the call."""
        if self.page is not None:
            self.page.enter(told)

    def leave(self) -> None:
        """Note its end."""
        if self.page is not None:
            self.page.leave()

    def explain(self, call: Call) -> CommError | None:
        """Nothing is known of the other ranks but what the backend says."""
        return None

    def check(self, call: Call) -> None:
        """Compare a call with all ranks, each one or one in SAMPLE_EVERY; CollectiveMismatch on all of them."""
        group = call.group
        if group.check == "sampled" and call.sequence % SAMPLE_EVERY != 1:
            return
        head = ring_head(call)
        size = HEAD_LIMIT + 16 * group.size
        own = torch.frombuffer(bytearray(head.ljust(size, b"\0")), dtype=torch.uint8)
        heard = [torch.empty_like(own) for _ in group.ranks]
        dist.all_gather(heard, own, group=self.side or group.process_group)
        trouble = disagreement([Ring.parse(row.numpy().tobytes()) for row in heard], group.ranks)
        if trouble:
            raise call.error(CollectiveMismatch, trouble)
