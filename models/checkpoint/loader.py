"""Loading one rank's share of a checkpoint, and agreeing on the outcome over all ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from ...comm.agreement import agree
from ...parallel.groups import Groups
from ...parallel.topology import Topology
from ..numerics import Numerics
from ..v4.config import V4Config
from .fill import fill, fill_int8
from .forms import W8A8_FORM, is_int8, scale_key
from .names import held_table
from .reader import CheckpointError, Reader, few
from .share import RankWeights, check_draft, check_topology, held_dtype, held_slices
from .verify import Checkpoint, open_checkpoint, read_config

TEXT_LIMIT = 2000
Result = TypeVar("Result")


def load_weights(
    directory: Path | str,
    topology: Topology,
    rank: int,
    numerics: Numerics,
    *,
    config: V4Config | None = None,
    draft: bool = False,
) -> tuple[V4Config, RankWeights]:
    """The target's weights as this rank holds them, on the CPU; with draft also those of its drafter or MTP layer,
    mtp.*, which otherwise are verified but not loaded.

    Everything is verified before the first weight is read. Only the rank's experts, output groups and head rows
    are read, and only their scales; but for w8a8 wo_b's channels whole. Each tensor is decoded, or for w8a8 quantised,
    into its final place. Raises CheckpointError for a faulty checkpoint, or one stored in INT8 with numerics other
    than w8a8, ValueError for a topology that does not divide the model, and for draft where there is no mtp.*.
    """
    checkpoint = _open(directory, topology, config)
    return checkpoint.config, read_share(checkpoint, topology, rank, numerics, draft=draft)


def load_on_all_ranks(
    directory: Path | str,
    groups: Groups,
    numerics: Numerics,
    *,
    config: V4Config | None = None,
    draft: bool = False,
) -> tuple[V4Config, RankWeights]:
    """load_weights on every rank of the world, with one verdict: what one rank finds wrong fails on all of them.

    All ranks call it. CheckpointError with the same text everywhere, naming the ranks that saw the fault; also
    when ranks read checkpoints of different shape. Nothing is returned half loaded.
    """
    topology, rank = groups.topology, groups.rank
    checkpoint = _together(lambda: _open(directory, topology, config), groups, Checkpoint.fingerprint)
    share = _together(lambda: read_share(checkpoint, topology, rank, numerics, draft=draft), groups)
    return checkpoint.config, share


def read_share(
    checkpoint: Checkpoint, topology: Topology, rank: int, numerics: Numerics, *, draft: bool = False
) -> RankWeights:
    """The rank's share of a verified checkpoint, with draft also of mtp.*. CheckpointError where it is stored in INT8
    and numerics not w8a8."""
    config = checkpoint.config
    check_topology(config, topology)
    check_draft(config, draft)
    if checkpoint.form == W8A8_FORM and numerics.quantisation != "w8a8":
        raise CheckpointError(
            f"{checkpoint.directory}: its weights are stored quantised to w8a8, numerics is {numerics.name}, allowed: "
            "w8a8; for others take the checkpoint that it was converted from"
        )
    share: dict[str, torch.Tensor] = {}
    rounded: list[str] = []
    with Reader(checkpoint.directory) as reader:
        for name, specs in held_table(config, draft=draft).items():
            held = [(spec, held_slices(spec, config, topology, rank)) for spec in specs]
            mine = [(spec, slices) for spec, slices in held if slices is not None]
            shape = tuple(s.stop - s.start for s in mine[0][1])
            stacked = (len(mine),) if specs[0].shard == "experts" else ()
            whole = torch.empty((*stacked, *shape), dtype=held_dtype(specs[0], numerics))
            share[name] = whole
            scale = torch.empty((*stacked, shape[0])) if is_int8(specs[0], numerics) else None
            if scale is not None:
                share[scale_key(name)] = scale
            for index, (spec, slices) in enumerate(mine):
                out = whole[index] if stacked else whole
                if scale is None:
                    exact = fill(out, spec, slices, checkpoint, reader)
                else:
                    scale_out = scale[index] if stacked else scale
                    exact = fill_int8(out, scale_out, spec, slices, checkpoint, reader)
                if not exact:
                    rounded.append(spec.name)
        log = checkpoint.log + tuple(reader.log)
    notes = (f"not exact in {numerics.name}, rounded: {few(rounded)}",) if rounded else ()
    return RankWeights(share, topology, rank, notes=checkpoint.notes + notes, log=log)


def _open(directory: Path | str, topology: Topology, config: V4Config | None) -> Checkpoint:
    # A topology that does not fit is no fault of the checkpoint, and is said first.
    check_topology(read_config(directory) if config is None else config, topology)
    return open_checkpoint(directory, config)


def _together(work: Callable[[], Result], groups: Groups, mark: Callable[[Result], int] | None = None) -> Result:
    """work() on every rank, then one exchange of outcomes; the same error on all ranks if any failed."""
    result, text = None, ""
    try:
        result = work()
    except Exception as error:  # A rank that raised here alone would leave the others waiting.
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    own = text.encode(errors="backslashreplace")[:TEXT_LIMIT]
    seen = mark(result) if mark is not None and result is not None else 0
    verdicts = agree((int(result is None), len(own), seen), groups, stage="load")
    if any(failed for failed, _, _ in verdicts):
        raise CheckpointError(_joint_text(own, [length for _, length, _ in verdicts], groups))
    marks = [number for _, _, number in verdicts]
    if len(set(marks)) > 1:
        odd = [rank for rank, number in enumerate(marks) if number != marks[0]]
        raise CheckpointError(f"ranks {odd} read another checkpoint than rank 0: config, names or shapes differ")
    assert result is not None
    return result


def _joint_text(own: bytes, lengths: list[int], groups: Groups) -> str:
    """Every distinct text of the ranks that failed, with their ranks."""
    width = max(lengths)
    padded = own + bytes(width - len(own))
    rows = agree(tuple(padded), groups, stage="load")
    ranks_by_text: dict[str, list[int]] = {}
    for rank, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if length:
            ranks_by_text.setdefault(bytes(row[:length]).decode(errors="replace"), []).append(rank)
    if len(lengths) == 1:
        return next(iter(ranks_by_text))
    return "; ".join(f"ranks {ranks}: {text}" for text, ranks in ranks_by_text.items())
