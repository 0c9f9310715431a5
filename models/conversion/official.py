"""Reading an official drafter: mtp.* of a checkpoint folder, checked against its table, values exact or refused.

Letters: O output channels, I inputs, U and V scale rows and columns.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.fill import fill
from ..checkpoint.names import TensorSpec
from ..checkpoint.reader import CheckpointError, Reader, Stored, list_stored
from ..checkpoint.verify import CONFIG_NAME, Checkpoint, match_table
from ..v4.config import CONFIG_LIMIT, V4Config
from ..v4.quant import CHUNK_ELEMENTS, QuantSpec, decode, is_exact
from .configs import official_shape, parse_official
from .names import DraftTensor
from .variants import PREFIX, Variant, check_variant, official_table, plain_table

PROBE = "mtp.0.attn.wq_a.weight"
"""Its dtype shows whether the weights are codes, or plain as an unquantised export has them."""

WINDOW = 256 << 20
"""Bytes that are read before the maps of what was read are let go."""

PLAIN_DTYPES = ("BF16", "F32")


@dataclass(frozen=True)
class Official:
    """A verified official drafter. config_bytes: config.json as it is; raw: what it says. root: where links may end."""

    variant: Variant
    checkpoint: Checkpoint
    table: tuple[TensorSpec, ...]
    raw: Mapping[str, Any]
    config_bytes: bytes
    is_quantised: bool
    root: Path | None

    @property
    def folder(self) -> Path:
        return self.checkpoint.directory

    @property
    def shape(self) -> V4Config:
        return self.checkpoint.config

    @property
    def stored(self) -> Mapping[str, Stored]:
        return self.checkpoint.stored

    def reader(self) -> Reader:
        """A reader of its shards that lets go of what was read."""
        return Reader(self.folder, window=WINDOW, root=self.root)


def open_official(folder: Path, variant: Variant, root: Path | None = None) -> Official:
    """Verify config, names, shapes and dtypes of mtp.*; only shards that hold some of it are opened, no weight is read.

    root: a folder around this one in which links may end. CheckpointError with every kind of fault found and the first
    few names of each.
    """
    path = folder / CONFIG_NAME
    config_bytes = read_bytes(path)
    raw = parse_official(config_bytes, str(path))
    stored, _ = list_stored(folder, PREFIX, root)
    check_variant(variant, stored, folder)
    shape = official_shape(variant, raw, path)
    probe = stored.get(PROBE)
    is_quantised = probe is None or probe.dtype not in PLAIN_DTYPES
    if probe is not None and not is_quantised and raw.get("quantization_config") is not None:
        raise CheckpointError(
            f"{path}: has a quantization_config, but {PROBE} is stored as {probe.dtype}; allowed beside it: F8_E4M3"
        )
    try:
        table = official_table(variant, shape)
    except ValueError as error:  # Widths that FP4 cannot store.
        raise CheckpointError(f"{path}: {error}") from error
    table = table if is_quantised else plain_table(table)
    by_name = match_table(table, stored, folder, allowed_dtypes)
    checkpoint = Checkpoint(folder, shape, by_name, (), ())
    return Official(variant, checkpoint, table, raw, config_bytes, is_quantised, root)


def allowed_dtypes(spec: TensorSpec) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Usual dtypes, and those that hold the same numbers: unsigned bytes of codes and scales, FP32 for BF16."""
    other = {"I8": ("I8", "U8"), "BF16": PLAIN_DTYPES}
    return other.get(spec.dtype, (spec.dtype,)), ("F8_E8M0", "U8")


def read_bytes(path: Path) -> bytes:
    """A config's bytes, one more than is allowed at most; CheckpointError where it cannot be read."""
    try:
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path}: not a file")
        with path.open("rb") as file:
            return file.read(CONFIG_LIMIT + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


def read_exact(out: torch.Tensor, spec: TensorSpec, official: Official, reader: Reader) -> None:
    """One official weight into `out`, of its logical shape, decoded. CheckpointError where out's dtype cannot hold its
    values, and for NaN and infinity in weights and scales."""
    whole = tuple(slice(0, size) for size in spec.shape)
    exact = fill(out, spec, whole, official.checkpoint, reader)
    stored = official.stored[spec.name]
    if spec.quant is None:
        exact = out.dtype == torch.float32 or stored.dtype != "F32" or torch.equal(reader.read(stored), out.float())
    elif not exact:
        # Only scales at the ends of their range leave it open.
        assert spec.scale_name is not None
        codes, scale = reader.read(stored), reader.read(official.stored[spec.scale_name])
        exact = is_decoded(out, codes, scale, spec.quant)
    if not exact:
        raise CheckpointError(
            f"{official.folder}: {spec.name} holds numbers that {out.dtype} would round, allowed: --dtype float32"
        )


def pieces(tensor: DraftTensor, dtype: torch.dtype, official: Official, reader: Reader) -> Iterator[torch.Tensor]:
    """A tensor of ours, expert by expert where it is a stack."""
    for parts in tensor.experts:
        out = torch.empty(tensor.shape[1:] if tensor.is_stack else tensor.shape, dtype=dtype)
        start = 0
        for spec in parts:
            read_exact(out[start : start + spec.shape[0]], spec, official, reader)
            start += spec.shape[0]
        yield out


def row_chunks(shape: tuple[int, ...], quant: QuantSpec) -> Iterator[slice]:
    """Runs of whole rows of blocks, of about as many values each as decoding works on at a time."""
    rows, columns = shape
    step = max(1, CHUNK_ELEMENTS // (columns * quant.block[0])) * quant.block[0]
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def is_decoded(weight_OI: torch.Tensor, codes: torch.Tensor, scale_UV: torch.Tensor, quant: QuantSpec) -> bool:
    """Whether the weight holds exactly the values of the codes."""
    for rows in row_chunks(weight_OI.shape, quant):
        scale = scale_UV[block_rows(rows, quant)]
        # The weight's own dtype will do where it surely holds what was decoded.
        dtype = weight_OI.dtype if is_exact(scale, quant, weight_OI.dtype) else torch.float64
        if not torch.equal(decode(codes[rows], scale, quant, dtype), weight_OI[rows].to(dtype)):
            return False
    return True


def block_rows(rows: slice, quant: QuantSpec) -> slice:
    """The rows of the scale of rows that begin with a block's."""
    return slice(rows.start // quant.block[0], -(-rows.stop // quant.block[0]))
