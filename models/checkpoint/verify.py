"""Checking a checkpoint folder against the name table before a single weight is read."""

import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..v4.config import CONFIG_LIMIT, V4Config, from_config_json
from ..v4.quant import FP4_GROUP
from .draft_kind import check_drafter
from .forms import OFFICIAL, W8A8_FORM, stored_table, stores_codes
from .names import TensorSpec, tensor_table
from .reader import CheckpointError, Reader, Stored, few, list_stored, read_json_object
from .shown import shown_value

CONFIG_NAME = "config.json"
TOKENIZER_NAME = "tokenizer.json"
TOKENIZER_LIMIT = 128 << 20
SCALE_DTYPES = ("F8_E8M0", "F32", "U8")
"""Official scales, the base releases' plain numbers, and e8m0 bytes under an integer's name."""

FORM_PROBE = "layers.0.attn.wq_b.weight"
"""Its dtype shows the stored form: I8 codes in w8a8's, FP8 in the official one."""


@dataclass(frozen=True)
class Checkpoint:
    """A verified folder: its config and where every tensor of the name table lies, by official name.

    notes tell what was tolerated. log holds (stored name, bytes) of the tables that were read for checking. form:
    how the target's weights are stored, official or w8a8.
    """

    directory: Path
    config: V4Config
    stored: Mapping[str, Stored]
    notes: tuple[str, ...]
    log: tuple[tuple[str, int], ...]
    form: str = OFFICIAL

    def fingerprint(self) -> int:
        """Number that differs, in all likelihood, between folders of different shape or names."""
        places = sorted((s.name, s.dtype, s.shape) for s in self.stored.values())
        return zlib.crc32(repr((json.dumps(self.config.to_json(), sort_keys=True), places)).encode())


def read_config(directory: Path | str) -> V4Config:
    """The folder's config.json; CheckpointError naming file, key, value and what is allowed."""
    return _read_config(Path(directory))[0]


def _read_config(directory: Path) -> tuple[V4Config, object]:
    """(the config, what config.json says of its quantisation's method)."""
    path = directory / CONFIG_NAME
    raw = read_json_object(path, CONFIG_LIMIT)
    try:
        config = from_config_json(raw)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return config, (raw.get("quantization_config") or {}).get("quant_method")


def open_checkpoint(directory: Path | str, config: V4Config | None = None) -> Checkpoint:
    """Verify index, headers, names, shapes, dtypes, hash tables and ids; no weight is read.

    config stands in for config.json if given. Experts are taken as FP4 or FP8 by what is stored, and the result's
    config says which. Raises CheckpointError with every kind of fault found and the first few names of each.
    """
    folder = Path(directory)
    method: object = None
    if config is None:
        config, method = _read_config(folder)
    stored, notes = list_stored(folder)
    form = _stored_form(stored, method, folder)
    config, expert_notes = _with_stored_experts(config, stored, form)
    _check_packing(config, folder)
    check_drafter(config, stored, folder)
    by_name = match_table(stored_table(config, form), stored, folder)
    _check_tokenizer(folder / TOKENIZER_NAME, config)
    with Reader(folder) as reader:
        _check_hash_tables(config, by_name, reader)
        log = tuple(reader.log)
    return Checkpoint(folder, config, by_name, notes + expert_notes, log, form)


def _stored_form(stored: Mapping[str, Stored], method: object, folder: Path) -> str:
    """The form of the target's weights, in which config.json's quant_method (None: not given) must agree."""
    probe = stored.get(FORM_PROBE)
    if probe is None:
        return W8A8_FORM if method == W8A8_FORM else OFFICIAL
    form = W8A8_FORM if probe.dtype == "I8" else OFFICIAL
    if method is not None and (method == W8A8_FORM) != (form == W8A8_FORM):
        wanted = "'w8a8'" if form == W8A8_FORM else "'fp8', as the official layout has it"
        raise CheckpointError(
            f"{folder / CONFIG_NAME}: quant_method is {shown_value(method)}, but {probe.name} is stored as "
            f"{probe.dtype}; allowed beside it: {wanted}"
        )
    return form


def _with_stored_experts(config: V4Config, stored: Mapping[str, Stored], form: str) -> tuple[V4Config, tuple[str, ...]]:
    """Base releases store FP8 experts; which it is shows in the dtype of the first that is not in the INT8 form."""
    names = (n for n in stored if ".ffn.experts." in n and n.endswith(".weight"))
    probe = next((stored[name] for name in names if form == OFFICIAL or name.startswith("mtp.")), None)
    expert_dtype = {"I8": "fp4", "F8_E4M3": "fp8"}.get(probe.dtype if probe else "", config.expert_dtype)
    if expert_dtype == config.expert_dtype:
        return config, ()
    note = f"experts are stored as {expert_dtype}, expert_dtype of the config is {config.expert_dtype!r}"
    return replace(config, expert_dtype=expert_dtype), (note,)


def usual_dtypes(spec: TensorSpec) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The dtypes in which a weight and its scale may be stored."""
    return (spec.dtype,), ("F32",) if stores_codes(spec) else SCALE_DTYPES


def match_table(
    table: Iterable[TensorSpec],
    stored: Mapping[str, Stored],
    folder: Path,
    dtypes: Callable[[TensorSpec], tuple[tuple[str, ...], tuple[str, ...]]] = usual_dtypes,
) -> dict[str, Stored]:
    """Official name -> place; one CheckpointError for all tensors that do not fit the table."""
    faults = _Faults()
    by_name: dict[str, Stored] = {}
    known: set[str] = set()
    for spec in table:
        weight = stored.get(spec.name)
        known.add(spec.name)
        of_weight, of_scale = dtypes(spec)
        if weight is not None:
            by_name[spec.name] = weight
            faults.compare(weight, spec.stored_shape, of_weight)
        if spec.scale_name is None or spec.scale_shape is None:
            if weight is None:
                faults.missing.append(spec.name)
            continue
        scales = [stored[name] for name in _scale_names(spec) if name in stored]
        known.update(_scale_names(spec))
        faults.pair(spec, weight, scales)
        for scale in scales:
            by_name[spec.scale_name] = scale
            faults.compare(scale, spec.scale_shape, of_scale)
    faults.unexpected += [name for name in stored if name not in known]
    faults.raise_any(folder)
    return by_name


def _scale_names(spec: TensorSpec) -> tuple[str, str]:
    assert spec.scale_name is not None
    return spec.scale_name, f"{spec.name}_scale_inv"


class _Faults:
    """What is wrong with the names, by kind."""

    def __init__(self) -> None:
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.shapes: list[str] = []
        self.dtypes: list[str] = []
        self.no_scale: list[str] = []
        self.no_weight: list[str] = []
        self.two_scales: list[str] = []

    def compare(self, stored: Stored, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
        if stored.shape != shape:
            self.shapes.append(f"{stored.name} {stored.shape}, allowed {shape}")
        if stored.dtype not in dtypes:
            self.dtypes.append(f"{stored.name} {stored.dtype}, allowed {' or '.join(dtypes)}")

    def pair(self, spec: TensorSpec, weight: Stored | None, scales: list[Stored]) -> None:
        names = [scale.name for scale in scales]
        if weight is None and not scales:
            self.missing.append(spec.name)
        elif weight is None:
            self.no_weight += names
        elif not scales:
            self.no_scale.append(spec.name)
        if len(scales) > 1:
            self.two_scales.append(" and ".join(names))

    def raise_any(self, folder: Path) -> None:
        kinds: Iterable[tuple[str, list[str]]] = (
            ("missing", self.missing),
            ("unexpected", self.unexpected),
            ("of wrong shape", self.shapes),
            ("of wrong dtype", self.dtypes),
            ("weights without a scale", self.no_scale),
            ("scales without a weight", self.no_weight),
            ("weights with two scales", self.two_scales),
        )
        found = [f"{kind} ({len(names)}): {few(names)}" for kind, names in kinds if names]
        if found:
            raise CheckpointError(f"{folder}: tensors do not fit the config: {'; '.join(found)}")


def _check_packing(config: V4Config, folder: Path) -> None:
    if config.expert_dtype != "fp4":
        return
    for name in ("hidden_size", "moe_intermediate_size"):
        width = getattr(config, name)
        if width % FP4_GROUP:
            raise CheckpointError(f"{folder}: {name} is {width}, allowed with fp4 experts: multiples of {FP4_GROUP}")


def _check_tokenizer(path: Path, config: V4Config) -> None:
    """A model with a vocabulary, and no id beyond the config's: such an id would index past the embedding."""
    # Also true of a link that leads nowhere, which is no optional file left out.
    if not os.path.lexists(path):
        return
    raw = read_json_object(path, TOKENIZER_LIMIT)
    model = raw.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocab, dict) or not vocab:
        raise CheckpointError(f"{path}: model.vocab is {shown_value(vocab)}, allowed: an object of token -> id")
    added = raw.get("added_tokens")
    if added is not None and not (isinstance(added, list) and all(isinstance(token, dict) for token in added)):
        raise CheckpointError(f"{path}: added_tokens is {shown_value(added)}, allowed: a list of objects")
    ids = [*vocab.items(), *((token.get("content"), token.get("id")) for token in added or ())]
    beyond = [
        f"{shown_value(token)} {shown_value(i)}"
        for token, i in ids
        if type(i) is not int or not 0 <= i < config.vocab_size
    ]
    if beyond:
        raise CheckpointError(f"{path}: ids beyond the vocabulary, allowed 0 to {config.vocab_size - 1}: {few(beyond)}")


def _check_hash_tables(config: V4Config, stored: Mapping[str, Stored], reader: Reader) -> None:
    for spec in tensor_table(config):
        if spec.role != "ids":
            continue
        table_VK = reader.read(stored[spec.name])
        low, high = (int(v) for v in table_VK.aminmax())
        if low < 0 or high >= config.n_routed_experts:
            rows = ((table_VK < 0) | (table_VK >= config.n_routed_experts)).any(dim=-1)
            raise CheckpointError(
                f"{reader.directory}: {spec.name} holds expert {low if low < 0 else high} "
                f"(token {_first(rows)}), allowed: 0 to {config.n_routed_experts - 1}"
            )
        ordered_VK = table_VK.sort(dim=-1).values
        repeated = (ordered_VK[:, 1:] == ordered_VK[:, :-1]).any(dim=-1)
        if bool(repeated.any()):
            raise CheckpointError(
                f"{reader.directory}: {spec.name} repeats an expert in the row of token {_first(repeated)}"
            )


def _first(rows: torch.Tensor) -> int:
    return int(rows.nonzero()[0])
