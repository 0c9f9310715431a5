"""Rows from one rank to another, one block after the other: bounded, acknowledged, ended from either side.

The group is a CPU group that nothing else uses at the same time (`Part.bridge`). Letters: S rows of a block, C columns.
"""

from collections import deque

import torch
import torch.distributed as dist

from ..parallel.errors import TransportError
from ..parallel.group import Group
from ..parallel.signature import Signature
from .backend import check_wire

ROWS_TAG, ACK_TAG = 11, 12
ROWS, END = 1, 2
TAKEN, STOP = 1, 2
MOST_ROWS = 1 << 40


class RowSender:
    """The sending end. dtype and columns are agreed; at most `depth` blocks are on their way, kept until taken."""

    def __init__(self, group: Group, peer: int, columns: int, dtype: torch.dtype, depth: int = 2) -> None:
        """peer: the group's rank that receives. ValueError for a dtype that does not travel."""
        if depth < 1:
            raise ValueError(f"depth is {depth}, allowed: 1 or more")
        check_wire(dtype, "dtype")
        self.group, self.peer, self.columns, self.dtype, self.depth = group, peer, columns, dtype, depth
        self.stopped = False
        self._posted: deque[list[dist.Work | None]] = deque()
        self._kept: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        self._number = 0

    def send(self, rows_SC: torch.Tensor, *, stage: str) -> bool:
        """Post a block; waits only while `depth` are not taken yet. False, with nothing sent, once the receiver has
        asked to stop. Rows are copied where they are not on the host and contiguous, and else kept as they are."""
        if rows_SC.ndim != 2 or rows_SC.shape[1] != self.columns or rows_SC.dtype != self.dtype:
            raise ValueError(
                f"rows are {rows_SC.dtype} {list(rows_SC.shape)}, allowed: {self.dtype} [rows, {self.columns}]"
            )
        while len(self._posted) >= self.depth and not self.stopped:
            self._take_ack(stage)
        if self.stopped:
            return False
        self._post(ROWS, rows_SC.detach().cpu().contiguous(), stage)
        return True

    def finish(self, *, stage: str) -> None:
        """No block comes any more: tell the receiver, and wait until it has taken what was sent."""
        self._post(END, torch.empty(0, self.columns, dtype=self.dtype), stage)
        while self._posted and not self.stopped:
            self._take_ack(stage)
        while self._posted:
            # A receiver that stopped takes what is under way without a word for each.
            self._wait(self._posted.popleft(), stage)

    def _post(self, kind: int, rows_SC: torch.Tensor, stage: str) -> None:
        self._number += 1
        head = torch.tensor([kind, self._number, rows_SC.shape[0]], dtype=torch.int64)
        moved = rows_SC.numel() * rows_SC.element_size()
        name = str(rows_SC.dtype).removeprefix("torch.")
        with self.group.call(Signature("send_rows", stage, name, rows_SC.shape[0], self.columns, moved=moved)):
            works = [_send(head, self.group, self.peer, ROWS_TAG)]
            if rows_SC.numel():
                works.append(_send(_bytes(rows_SC), self.group, self.peer, ROWS_TAG))
        self._posted.append(works)
        self._kept.append((head, rows_SC))

    def _take_ack(self, stage: str) -> None:
        word = torch.zeros(2, dtype=torch.int64)
        with self.group.call(Signature("receive_ack", stage)) as call:
            _receive(word, self.group, self.peer, ACK_TAG)
            kind, number = word.tolist()
            if kind == STOP:
                self.stopped = True
                return
            if kind != TAKEN or number != self._number - len(self._posted) + 1:
                raise call.error(TransportError, f"acknowledged is block {number} with word {kind}")
        self._wait(self._posted.popleft(), stage)
        self._kept.popleft()

    def _wait(self, works: list[dist.Work | None], stage: str) -> None:
        with self.group.call(Signature("finish_send_rows", stage)):
            while works:
                work = works.pop(0)
                if work is not None:
                    work.wait()


class RowReceiver:
    """The receiving end; ask for the blocks one by one."""

    def __init__(self, group: Group, peer: int, columns: int, dtype: torch.dtype) -> None:
        """peer: the group's rank that sends."""
        check_wire(dtype, "dtype")
        self.group, self.peer, self.columns, self.dtype = group, peer, columns, dtype
        self._number = 0
        self._ended = False
        self._told: deque[tuple[dist.Work | None, torch.Tensor]] = deque()

    def receive(self, rows: int | None = None, *, stage: str) -> torch.Tensor | None:
        """The next block [S, C] on the host, None once the sender has finished. TransportError unless it has `rows`
        rows, where that is known."""
        if self._ended:
            return None
        block = self._next(rows, stage)
        self._tell(TAKEN, self._number, stage)
        if self._ended:
            self._finish(stage)
        return block

    def stop(self, *, stage: str) -> None:
        """Ask the sender to stop, and take what it still sends. Without effect after its end."""
        if self._ended:
            return
        self._tell(STOP, self._number + 1, stage)
        while self._next(None, stage) is not None:
            pass
        self._finish(stage)

    def _next(self, rows: int | None, stage: str) -> torch.Tensor | None:
        head = torch.zeros(3, dtype=torch.int64)
        with self.group.call(Signature("receive_rows", stage)) as call:
            _receive(head, self.group, self.peer, ROWS_TAG)
            kind, number, count = head.tolist()
            self._number += 1
            if kind not in (ROWS, END) or number != self._number or not 0 <= count < MOST_ROWS:
                raise call.error(TransportError, f"block {self._number} is announced as {[kind, number, count]}")
            if kind == END:
                self._ended = True
                return None
            if rows is not None and count != rows:
                raise call.error(TransportError, f"block {number} has {count} rows, awaited: {rows}")
            block_SC = torch.empty(count, self.columns, dtype=self.dtype)
            if block_SC.numel():
                _receive(_bytes(block_SC), self.group, self.peer, ROWS_TAG)
        return block_SC

    def _tell(self, word: int, number: int, stage: str) -> None:
        # The sender looks for it when it needs to; nothing here waits for that.
        while self._told and _is_over(self._told[0][0]):
            self._told.popleft()
        words = torch.tensor([word, number], dtype=torch.int64)
        with self.group.call(Signature("send_ack", stage)):
            self._told.append((_send(words, self.group, self.peer, ACK_TAG), words))

    def _finish(self, stage: str) -> None:
        """The sender reads every word before it is done."""
        with self.group.call(Signature("finish_send_ack", stage)):
            while self._told:
                work, _ = self._told.popleft()
                if work is not None:
                    work.wait()


def _is_over(work: dist.Work | None) -> bool:
    return work is None or bool(work.is_completed())


def _send(tensor: torch.Tensor, group: Group, peer: int, tag: int) -> dist.Work | None:
    return dist.isend(tensor, group=group.process_group, tag=tag, group_dst=peer)


def _receive(tensor: torch.Tensor, group: Group, peer: int, tag: int) -> None:
    work = dist.irecv(tensor, group=group.process_group, tag=tag, group_src=peer)
    if work is not None:
        work.wait()


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(-1).view(torch.uint8)
