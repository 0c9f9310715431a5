"""One stored tensor, or slices of it, into the place where a rank holds it.

Letters: O output channels, I inputs that are kept, J all inputs of a channel, R rows of a chunk.
"""

from pathlib import Path

import torch

from ..int8.quantise import CODE_MAX, quantise_weight
from ..v4.quant import CHUNK_ELEMENTS, decode, is_exact
from .forms import stored_spec, stores_codes
from .names import TensorSpec
from .reader import CheckpointError, Reader, Stored
from .verify import Checkpoint

Slices = tuple[slice, ...]


def fill(out: torch.Tensor, spec: TensorSpec, slices: Slices, checkpoint: Checkpoint, reader: Reader) -> bool:
    """Decode the slices of one tensor into out; False if out's dtype may have rounded it. CheckpointError."""
    stored = checkpoint.stored[spec.name]
    exact = True
    if spec.quant is None:
        out.copy_(reader.read(stored, slices))
    else:
        codes, scale = _read_blocks(spec, slices, checkpoint, reader)
        exact = is_exact(scale, spec.quant, out.dtype)
        decode(codes, scale, spec.quant, out.dtype, out=out, origin=(slices[0].start, slices[1].start))
    if out.is_floating_point() and not all(bool(torch.isfinite(end)) for end in out.aminmax()):
        raise _not_finite(stored, out.dtype, checkpoint.directory)
    return exact


def fill_int8(
    codes_OI: torch.Tensor,
    scale_O: torch.Tensor,
    spec: TensorSpec,
    slices: Slices,
    checkpoint: Checkpoint,
    reader: Reader,
) -> bool:
    """INT8 codes of the slices, and the scales of their channels, read where they are stored, else quantised from the
    decoded FP32 values, some rows at a time. A channel is its whole stored row, whatever columns are kept.

    False if decoding may have rounded. CheckpointError.
    """
    form = stored_spec(spec, checkpoint.form)
    if stores_codes(form):
        _read_codes(codes_OI, scale_O, form, slices, checkpoint, reader)
        return True
    rows, columns = slices
    assert spec.quant is not None, spec.name
    codes_OJ, blocks = _read_blocks(spec, (rows, slice(0, spec.shape[1])), checkpoint, reader)
    step = max(1, CHUNK_ELEMENTS // spec.shape[1])
    wide = torch.empty(min(step, len(codes_OI)), spec.shape[1])
    for start in range(0, len(codes_OI), step):
        stop = min(start + step, len(codes_OI))
        at = _touched(slice(rows.start + start, rows.start + stop), spec.quant.block[0])
        first = rows.start // spec.quant.block[0]
        chunk_RJ = wide[: stop - start]
        decode(
            codes_OJ[start:stop], blocks[at.start - first : at.stop - first], spec.quant, torch.float32,
            out=chunk_RJ, origin=(rows.start + start, 0),
        )  # fmt: skip
        low_R, high_R = chunk_RJ.aminmax(dim=1)
        amplitude_R = torch.maximum(-low_R, high_R)
        if not bool(torch.isfinite(amplitude_R).all()):
            raise _not_finite(checkpoint.stored[spec.name], torch.float32, checkpoint.directory)
        codes_OI[start:stop], scale_O[start:stop] = quantise_weight(chunk_RJ[:, columns], amplitude_R)
    return is_exact(blocks, spec.quant, torch.float32)


def _read_blocks(
    spec: TensorSpec, slices: Slices, checkpoint: Checkpoint, reader: Reader
) -> tuple[torch.Tensor, torch.Tensor]:
    """(stored codes of the slices, scales of the blocks that they touch), the scales checked."""
    assert spec.quant is not None and spec.scale_name is not None, spec.name
    place = checkpoint.stored[spec.scale_name]
    scale = reader.read(place, tuple(_touched(s, block) for s, block in zip(slices, spec.quant.block, strict=True)))
    _check_scale(scale, place, checkpoint.directory)
    return reader.read(checkpoint.stored[spec.name], _packed(slices, spec)), scale


def _read_codes(
    codes_OI: torch.Tensor,
    scale_O: torch.Tensor,
    spec: TensorSpec,
    slices: Slices,
    checkpoint: Checkpoint,
    reader: Reader,
) -> None:
    assert spec.scale_name is not None
    stored, place = checkpoint.stored[spec.name], checkpoint.stored[spec.scale_name]
    scale_O.copy_(reader.read(place, slices[:1]))
    if not bool((torch.isfinite(scale_O) & (scale_O > 0)).all()):
        raise CheckpointError(
            f"{checkpoint.directory}: scale {place.name} holds a number that is no channel scale, allowed: finite "
            "ones above 0"
        )
    codes_OI.copy_(reader.read(stored, slices))
    if codes_OI.numel() and int(codes_OI.amin()) < -CODE_MAX:
        raise CheckpointError(
            f"{checkpoint.directory}: {stored.name} holds code {-CODE_MAX - 1}, allowed: {-CODE_MAX} to {CODE_MAX}"
        )


def _packed(slices: Slices, spec: TensorSpec) -> Slices:
    """Slices of the stored codes for slices of the logical weight."""
    per_item = spec.shape[-1] // spec.stored_shape[-1]
    return (*slices[:-1], slice(slices[-1].start // per_item, slices[-1].stop // per_item))


def _touched(part: slice, block: int) -> slice:
    return slice(part.start // block, -(-part.stop // block))


def _check_scale(scale: torch.Tensor, place: Stored, directory: Path) -> None:
    if scale.dtype == torch.float32:
        bad = not bool(torch.isfinite(scale).all())
    else:
        bad = bool((scale.view(torch.uint8) == 255).any())
    if bad:
        raise CheckpointError(f"{directory}: scale {place.name} holds NaN or infinity")


def _not_finite(stored: Stored, dtype: torch.dtype, directory: Path) -> CheckpointError:
    return CheckpointError(f"{directory}: {stored.name} holds NaN or infinity in {dtype}")
