"""A draft of ours to the official mtp.* layout, unquantised or quantised again. training.md 8.4."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad

from ..checkpoint.names import TensorSpec
from ..checkpoint.reader import CheckpointError, Reader, Stored, few, read_header, read_json_object
from ..checkpoint.stream import TORCH_DTYPES, Planned, stream_shards
from ..checkpoint.verify import CONFIG_NAME
from ..checkpoint.writer import write_json_file
from ..v4.config import CONFIG_LIMIT
from ..v4.quant import encode, encode_with
from .configs import check_draft_json, draft_json, has_markov, official_shape, parse_official, unquantised
from .folder import DTYPES_NAME, OFFICIAL_CONFIG, SCALES_NAME, SHARD_BYTES, Converted, check_target, writing_to
from .names import CONFIDENCE, Place, draft_tensors, is_markov, places, without_markov
from .official import allowed_dtypes, block_rows, is_decoded, read_bytes, row_chunks
from .ours import Ours, open_ours
from .variants import GATE_BIAS, IMAGE_BIAS, Variant, count_files, official_table, plain_table

FORMATS = ("bf16", "official")
LEAST_EXPONENT = -127
"""Of the scales that an export chooses: as low as e8m0 goes, so that no official value is lost."""

DTYPES_LIMIT = 4 << 20
_MARGIN = 16 << 20


@dataclass
class _Export:
    """One export at work: where our tensors lie, the kept scales, scales that wait for their turn, what was rounded.

    zeros: names of official tensors that the draft has not, the Markov tables of one without a Markov head.
    """

    ours: Ours
    reader: Reader
    places: Mapping[str, Place]
    kept: Mapping[str, Stored]
    kept_reader: Reader | None
    zeros: frozenset[str]
    scales: dict[str, torch.Tensor] = field(default_factory=dict)
    rounded: list[str] = field(default_factory=list)


def export_dspark(
    source: Path,
    target: Path,
    variant: Variant,
    *,
    form: str = "bf16",
    keep_scales: bool = False,
    official_config: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Converted:
    """Write a draft's folder as official mtp.*.

    form "bf16": unquantised, FP32 where the official file is, its config that of the target without quantisation.
    "official": quantised again, the config as it was; keep_scales: with the scales that the import kept, and then
    byte for byte what was imported. official_config: the target's config.json, by default the one that the import
    left beside the draft. gate.bias_vl is written as a copy of gate.bias, or as it was kept. A draft without a Markov
    head gets tables of zeros in the config's rank, and zeros in their place of its confidence: it drafts as it did.
    All is checked before anything is written. Where values had to be rounded the notes say so; with keep_scales that
    is an error. CheckpointError for a faulty source, ValueError for what was asked wrongly; after either nothing is
    left that was written.
    """
    _check_asked(form, keep_scales)
    check_target(source, target, overwrite)
    path = source / OFFICIAL_CONFIG if official_config is None else official_config
    config_bytes, raw = _read_official_config(path, official_config is None)
    shape = official_shape(variant, raw, path)
    own_config = source / CONFIG_NAME
    own = read_json_object(own_config, CONFIG_LIMIT)
    markov = variant.drafter != "dspark" or has_markov(own)
    check_draft_json(own, draft_json(variant, shape, raw, "", markov), own_config)
    if form == "official" and raw.get("quantization_config") is None:
        raise ValueError(
            f"{path} has no quantization_config that --format official could follow, allowed: --format bf16"
        )
    table = official_table(variant, shape)
    tensors = draft_tensors(table)
    tensors = tensors if markov else without_markov(tensors, shape.hidden_size)
    zeros = frozenset(spec.name for spec in table if not markov and is_markov(spec, variant))
    ours = open_ours(source, tensors)
    table = table if form == "official" else plain_table(table)
    kept: Mapping[str, Stored] = {}
    if keep_scales:
        table, kept = _kept(source, table)
    with ExitStack() as stack:
        reader = stack.enter_context(ours.reader())
        kept_reader = stack.enter_context(Reader(source)) if keep_scales else None
        export = _Export(ours, reader, places(tensors), kept, kept_reader, zeros)
        planned = [each for spec in table for each in _plan(spec, export)]
        num_bytes = sum(each.num_bytes for each in planned)
        assert len(planned) == count_files(table)
        with writing_to(target, num_bytes + _MARGIN):
            shards = 0
            for number, shards in stream_shards(target, planned, shard_bytes):
                if progress is not None:
                    progress(number, shards)
            if form == "official":
                _write_config_bytes(target, config_bytes)
            else:
                write_json_file(target / CONFIG_NAME, unquantised(raw, variant.drafter))
    rounded = export.rounded
    notes = [f"rounded to what {form} holds: {len(rounded)} tensors: {few(rounded)}"] if rounded else []
    if zeros:
        notes.append(f"the draft has no Markov head, so these are zeros: {few(sorted(zeros))}")
    return Converted(len(planned), num_bytes, shards, sum(tensor.numel for tensor in tensors), tuple(notes))


def _check_asked(form: str, keep_scales: bool) -> None:
    if form not in FORMATS:
        raise ValueError(f"format is {form!r}, allowed: {', '.join(FORMATS)}")
    if keep_scales and form != "official":
        raise ValueError(f"--keep-scales goes with --format official, not with {form}, which has no scales")


def _read_official_config(path: Path, by_default: bool) -> tuple[bytes, dict[str, Any]]:
    if by_default and not path.exists():
        raise ValueError(
            f"{path.parent} has no {OFFICIAL_CONFIG}, as an import leaves it; allowed: --official-config FILE, the "
            "config.json of the target that the draft is for"
        )
    data = read_bytes(path)
    return data, parse_official(data, str(path))


def _write_config_bytes(target: Path, data: bytes) -> None:
    partial_path = target / f"{CONFIG_NAME}.partial"
    partial_path.write_bytes(data)
    partial_path.rename(target / CONFIG_NAME)


def _kept(source: Path, table: tuple[TensorSpec, ...]) -> tuple[tuple[TensorSpec, ...], dict[str, Stored]]:
    """(the table in the dtypes that were imported, name -> place of what was kept). CheckpointError unless it fits."""
    path = source / SCALES_NAME
    if not path.exists():
        raise ValueError(f"--keep-scales: {source} has no {SCALES_NAME}, as an import with --keep-scales leaves it")
    found = read_header(path)
    wanted = {spec.scale_name: spec.scale_shape for spec in table if spec.scale_name is not None}
    wanted |= {spec.name: spec.shape for spec in table if spec.name.endswith(IMAGE_BIAS)}
    absent = [name for name in wanted if name is not None and name not in found]
    extra = [name for name in found if name not in wanted]
    wrong = [name for name, stored in found.items() if name in wanted and stored.shape != wanted[name]]
    dtypes = [
        name for name, stored in found.items()
        if stored.dtype not in (("F32",) if name.endswith(IMAGE_BIAS) else ("F8_E8M0", "U8"))
    ]  # fmt: skip
    kinds = (("missing", absent), ("unexpected", extra), ("of wrong shape", wrong), ("of wrong dtype", dtypes))
    faults = [f"{kind} ({len(names)}): {few(names)}" for kind, names in kinds if names]
    if faults:
        raise CheckpointError(f"{path}: does not fit the official config: {'; '.join(faults)}")
    return tuple(_with_dtypes(table, source / DTYPES_NAME)), found


def _with_dtypes(table: tuple[TensorSpec, ...], path: Path) -> Iterator[TensorSpec]:
    dtypes = read_json_object(path, DTYPES_LIMIT)
    for spec in table:
        dtype = dtypes.pop(spec.name, spec.dtype)
        if dtype not in allowed_dtypes(spec)[0]:
            raise CheckpointError(
                f"{path}: {spec.name} is {dtype!r:.80}, allowed: {', '.join(allowed_dtypes(spec)[0])}"
            )
        yield replace(spec, dtype=dtype)
    if dtypes:
        raise CheckpointError(f"{path}: names tensors that are none of the drafter's: {few(list(dtypes))}")


def _plan(spec: TensorSpec, export: _Export) -> Iterator[Planned]:
    """The tensor as it is stored, behind it its scale."""
    if spec.quant is None:
        yield Planned(spec.name, spec.dtype, spec.shape, partial(_plain, spec, export))
        return
    assert spec.scale_name is not None and spec.scale_shape is not None
    kept = export.kept.get(spec.scale_name)
    yield Planned(spec.name, spec.dtype, spec.stored_shape, partial(_codes, spec, export))
    scale_dtype = "F8_E8M0" if kept is None else kept.dtype
    yield Planned(spec.scale_name, scale_dtype, spec.scale_shape, partial(_scale, spec, export))


def _plain(spec: TensorSpec, export: _Export) -> Iterator[torch.Tensor]:
    kept = export.kept.get(spec.name)
    if kept is not None:
        assert export.kept_reader is not None
        yield export.kept_reader.read(kept)
        return
    if spec.name in export.zeros:
        yield torch.zeros(spec.shape, dtype=TORCH_DTYPES[spec.dtype])
        return
    # The image bias was dropped: its place is that of the bias beside it.
    name = spec.name.removesuffix(IMAGE_BIAS) + GATE_BIAS if spec.name.endswith(IMAGE_BIAS) else spec.name
    weight = export.ours.read(export.places[name], export.reader)
    if spec.name.endswith(CONFIDENCE):
        weight = pad(weight, (0, spec.shape[1] - weight.shape[1]))
    out = weight.to(TORCH_DTYPES[spec.dtype])
    if not torch.equal(out.to(weight.dtype), weight):
        if not bool(torch.isfinite(out).all()):
            raise CheckpointError(f"{export.ours.folder}: {spec.name} holds numbers beyond the largest of {spec.dtype}")
        export.rounded.append(spec.name)
    yield out


def _codes(spec: TensorSpec, export: _Export) -> Iterator[torch.Tensor]:
    assert spec.quant is not None and spec.scale_name is not None
    weight = export.ours.read(export.places[spec.name], export.reader)
    kept = export.kept.get(spec.scale_name)
    scale = None
    if kept is not None:
        assert export.kept_reader is not None
        scale = export.kept_reader.read(kept)
        if bool((scale.view(torch.uint8) == 255).any()):
            raise CheckpointError(f"{export.ours.folder}: kept scale {spec.scale_name} holds NaN")
    codes, scale = _encoded(weight, spec, scale)
    if not is_decoded(weight, codes, scale, spec.quant):
        if kept is not None:
            raise CheckpointError(
                f"{export.ours.folder}: {spec.name} has values that its kept scales did not give, as after training; "
                "allowed with --keep-scales: a draft as it was imported"
            )
        export.rounded.append(spec.name)
    export.scales[spec.scale_name] = scale
    yield codes.view(torch.uint8) if spec.dtype == "U8" else codes


def _encoded(
    weight_OI: torch.Tensor, spec: TensorSpec, given: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scale): some rows at a time, so that temporaries stay small."""
    assert spec.quant is not None and spec.scale_shape is not None
    codes = torch.empty(spec.stored_shape, dtype=torch.uint8)
    scale = torch.empty(spec.scale_shape, dtype=torch.float8_e8m0fnu) if given is None else given
    for rows in row_chunks(spec.shape, spec.quant):
        blocks = block_rows(rows, spec.quant)
        if given is None:
            part, own = encode(weight_OI[rows], spec.quant, least=LEAST_EXPONENT)
            scale.view(torch.uint8)[blocks] = own.view(torch.uint8)
        else:
            part = encode_with(weight_OI[rows], given[blocks], spec.quant)
        codes[rows] = part.view(torch.uint8)
    return codes.view(torch.float8_e4m3fn if spec.quant.kind == "fp8" else torch.int8), scale


def _scale(spec: TensorSpec, export: _Export) -> Iterator[torch.Tensor]:
    # Its weight was written just before: both hold items of one byte, so their order is that of the plan.
    assert spec.scale_name is not None
    yield export.scales.pop(spec.scale_name)
