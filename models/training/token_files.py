"""Samples to train on: *.jsonl files of token ids, one sample a line, checked whole before anything starts.

A line is an object with "prompt_ids" and "output_ids" (lists of ids), as `meshspark generate --json` has them in its
requests, and maybe "loss_mask", one 0 or 1 for every id of both; other keys are left alone. Without a mask the loss is
on output_ids. Legend: S tokens of a sample.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MOST_LINE_BYTES = 64 << 20
MOST_LINES = 1 << 28


@dataclass(frozen=True)
class TokenSample:
    """input_ids [S] int32; loss_mask [S] uint8, 1 on tokens that are learned."""

    input_ids: np.ndarray
    loss_mask: np.ndarray

    def __len__(self) -> int:
        return len(self.input_ids)


def parse_sample(line: bytes | str, where: str, vocab_size: int, longest: int | None = None) -> TokenSample:
    """The sample of a line. ValueError that begins with `where` and names the field, its value and what is allowed.

    longest: tokens that a sample may have, None for any number.
    """
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{where}: no JSON: {problem}") from problem
    if not isinstance(data, dict):
        raise ValueError(f"{where}: is a {type(data).__name__}, allowed: an object with prompt_ids and output_ids")
    prompt, output = (_ids(data, name, where, vocab_size) for name in ("prompt_ids", "output_ids"))
    ids = np.array(prompt + output, dtype=np.int32)
    if longest is not None and len(ids) > longest:
        raise ValueError(f"{where}: prompt_ids and output_ids are {len(ids)} tokens, allowed: {longest}")
    mask = _mask(data, where, len(prompt), len(ids))
    if not has_anchor(mask):
        raise ValueError(f"{where}: no two tokens in a row are learned, allowed: one such pair or more")
    return TokenSample(ids, mask)


def has_anchor(loss_mask_S: np.ndarray) -> bool:
    """Whether a block can begin anywhere: two learned tokens in a row (training.md 7.2)."""
    return bool((loss_mask_S[:-1] & loss_mask_S[1:]).any())


def _ids(data: dict[str, Any], name: str, where: str, vocab_size: int) -> list[int]:
    value = data.get(name)
    if not isinstance(value, list):
        raise ValueError(f"{where}: {name} is {_short(value)}, allowed: a list of ids")
    for place, token in enumerate(value):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ValueError(f"{where}: {name}[{place}] is {_short(token)}, allowed: 0 to {vocab_size - 1}")
    return value


def _mask(data: dict[str, Any], where: str, prompt: int, total: int) -> np.ndarray:
    value = data.get("loss_mask")
    if value is None:
        mask = np.ones(total, dtype=np.uint8)
        mask[:prompt] = 0
        return mask
    if not isinstance(value, list) or len(value) != total:
        length = f"{len(value)} values" if isinstance(value, list) else _short(value)
        raise ValueError(f"{where}: loss_mask is {length}, allowed: a list of {total}, one for every id")
    for place, each in enumerate(value):
        if type(each) not in (int, bool) or each not in (0, 1):
            raise ValueError(f"{where}: loss_mask[{place}] is {_short(each)}, allowed: 0 or 1")
    return np.array(value, dtype=np.uint8)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


@dataclass(frozen=True)
class _Line:
    file: int
    number: int
    offset: int
    tokens: int


class TokenFiles:
    """All samples of a folder's *.jsonl files, in order of file name and line; read again when asked for.

    lengths: tokens of each. digest: SHA-256 over the names and bytes of the files, to tell one set of data from
    another when a run is resumed.
    """

    def __init__(self, directory: Path, vocab_size: int, longest: int | None = None) -> None:
        """Reads and checks every line. ValueError names file, line and field; without any sample, the folder."""
        self.directory, self.vocab_size, self.longest = directory, vocab_size, longest
        if not directory.is_dir():
            raise ValueError(f"{directory}: there is no such folder")
        self.files = sorted(path for path in directory.glob("*.jsonl") if path.is_file())
        if not self.files:
            raise ValueError(f"{directory}: has no *.jsonl file; allowed: one or more, a sample a line")
        digest = hashlib.sha256()
        self._lines: list[_Line] = []
        for place, path in enumerate(self.files):
            digest.update(path.name.encode())
            self._scan(place, path, digest)
        self.digest = digest.hexdigest()
        if not self._lines:
            raise ValueError(f"{directory}: its *.jsonl files have no line; allowed: one sample or more")

    def _scan(self, place: int, path: Path, digest: Any) -> None:
        with path.open("rb") as file:
            number, offset = 0, 0
            while line := file.readline(MOST_LINE_BYTES + 1):
                number += 1
                where = f"{path}:{number}"
                if len(line) > MOST_LINE_BYTES:
                    raise ValueError(f"{where}: is longer than {MOST_LINE_BYTES} bytes")
                digest.update(line)
                if line.strip():
                    sample = parse_sample(line, where, self.vocab_size, self.longest)
                    self._lines.append(_Line(place, number, offset, len(sample)))
                offset += len(line)
                if len(self._lines) > MOST_LINES:
                    raise ValueError(f"{self.directory}: has more than {MOST_LINES} samples")

    @property
    def lengths(self) -> Sequence[int]:
        return [line.tokens for line in self._lines]

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> TokenSample:
        """The sample of that place. ValueError where its line changed since the folder was read."""
        line = self._lines[index]
        path = self.files[line.file]
        with path.open("rb") as file:
            file.seek(line.offset)
            sample = parse_sample(file.readline(MOST_LINE_BYTES), f"{path}:{line.number}", self.vocab_size)
        if len(sample) != line.tokens:
            raise ValueError(f"{path}:{line.number}: has {len(sample)} tokens, when first read it had {line.tokens}")
        return sample
