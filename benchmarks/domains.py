"""Prompts of three kinds of held-out text, from rigid to free: windows of whole lines, the same on every run.

The rule for Python source, line by line (`line_kinds`): a line is of `tables` where it holds constants and punctuation
alone, or gives a name such a value; of `prose` where it is a comment, a docstring, or inside a string of several lines;
of `code` otherwise; a blank line is of no kind. A window is of a kind that SHARE of its lines that are not blank have.
"""

import io
import keyword
import tokenize
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from ..launch.generate import read_text_file
from ..launch.sample_data import is_held_out, source_files
from ..launch.tokenizer import TextTokenizer

KINDS = ("tables", "code", "prose")
"""From rigid to free."""
ALL = "all"
"""Windows of the whole text, of whatever kind."""
SHARE = 0.8
TEXT_LIMIT = 64 << 20

_CONSTANT = (tokenize.NUMBER, tokenize.STRING)
_LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
_WORDS = ("None", "True", "False")


@dataclass(frozen=True)
class Domain:
    """Prompts of one kind of text, all of one length, the begin token first where there is one."""

    name: str
    prompts: tuple[tuple[int, ...], ...]


def held_out_texts() -> list[str]:
    """The files of the standard library that the bundled sample was not trained on, by name."""
    return [text for _, text in source_files(is_held_out)]


def read_text(path: Path) -> str:
    """A text of the user's. ValueError naming the file where it is too large or no text."""
    return read_text_file("--text", path, TEXT_LIMIT)


def line_kinds(source: str) -> list[str | None]:
    """The kind of every line of Python source, None of a blank one; of source that is none, every line's is None."""
    lines = source.split("\n")
    kinds: list[str | None] = [None] * len(lines)
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (tokenize.TokenError, SyntaxError):
        return kinds
    for statement in _statements(tokens):
        own = [token for token in statement if token.type not in _LAYOUT]
        is_docstring = bool(own) and all(token.type == tokenize.STRING for token in own)
        for token in statement:
            if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip():
                kinds[token.start[0] - 1] = "prose"
        by_line: dict[int, list[tokenize.TokenInfo]] = {}
        for token in own:
            by_line.setdefault(token.start[0], []).append(token)
        for number, found in by_line.items():
            kinds[number - 1] = "prose" if is_docstring else "tables" if _is_constant(found) else "code"
        for token in own:
            is_long = token.type == tokenize.STRING and token.end[0] > token.start[0]
            for number in range(token.start[0], token.end[0] + 1) if is_long else ():
                kinds[number - 1] = "prose" if lines[number - 1].strip() else None
    return kinds


def _statements(tokens: Iterable[tokenize.TokenInfo]) -> Iterable[list[tokenize.TokenInfo]]:
    """Tokens up to the end of each logical line."""
    found: list[tokenize.TokenInfo] = []
    for token in tokens:
        found.append(token)
        if token.type == tokenize.NEWLINE:
            yield found
            found = []
    yield found


def _is_constant(tokens: Sequence[tokenize.TokenInfo]) -> bool:
    """Whether a line's tokens are constants and punctuation, a NAME = before them or not."""
    if [token.string for token in tokens[1:2]] == ["="] and tokens[0].type == tokenize.NAME:
        tokens = () if keyword.iskeyword(tokens[0].string) else tokens[2:]
    constants = [token for token in tokens if token.type in _CONSTANT or token.string in _WORDS]
    marks = [token for token in tokens if token.type == tokenize.OP]
    return bool(constants) and len(constants) + len(marks) == len(tokens)


@dataclass(frozen=True)
class Lines:
    """A text as tokens and lines. ids, starts, ends: of its tokens, with the characters where they begin and end.
    begins: the characters where its lines begin, and the text's end. kinds: of its lines, none where nobody asked."""

    ids: Sequence[int]
    starts: Sequence[int]
    ends: Sequence[int]
    begins: Sequence[int]
    kinds: Sequence[str | None] = ()

    def is_of(self, kind: str, first: int, behind: int) -> bool:
        """Whether SHARE of these lines, those that are blank left out, are of the kind."""
        own = [each for each in self.kinds[first:behind] if each is not None]
        return bool(own) and sum(each == kind for each in own) >= SHARE * len(own)


def split_text(text: str, tokenizer: TextTokenizer, *, with_kinds: bool) -> Lines:
    """A text as tokens and lines."""
    encoding = tokenizer.tokenizer.encode(text, add_special_tokens=False)
    starts, ends = ([each[side] for each in encoding.offsets] for side in (0, 1))
    begins = [0, *accumulate(len(line) + 1 for line in text.split("\n"))]
    return Lines(encoding.ids, starts, ends, begins, line_kinds(text) if with_kinds else ())


def windows(lines: Lines, length: int, kind: str | None = None) -> list[list[int]]:
    """Windows of `length` ids that begin with a line and do not overlap: the first of the kind (None for any), then the
    next behind it."""
    found, last = [], 0
    for line, begin in enumerate(lines.begins[:-1]):
        token = bisect_left(lines.starts, begin)
        if begin < last or token + length > len(lines.ids):
            continue
        end = lines.ends[token + length - 1]
        if kind is None or lines.is_of(kind, line, bisect_left(lines.begins, end)):
            found.append(list(lines.ids[token : token + length]))
            last = end
    return found


def make_domain(
    name: str, texts: Sequence[Lines], tokenizer: TextTokenizer, *, prompts: int, tokens: int, kind: str | None = None
) -> Domain:
    """So many prompts of so many ids, evenly spaced over the windows that the texts have, of a kind where one is given.
    ValueError where there are fewer windows than prompts, naming both."""
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    if tokens <= len(begin):
        raise ValueError(f"prompts have {tokens} tokens, allowed: at least {len(begin) + 1}")
    found = [ids for lines in texts for ids in windows(lines, tokens - len(begin), kind)]
    if len(found) < prompts:
        raise ValueError(f"{name} has {len(found)} windows of {tokens} tokens, needed: {prompts}; give more text")
    chosen = [found[(2 * i + 1) * len(found) // (2 * prompts)] for i in range(prompts)]
    return Domain(name, tuple((*begin, *ids) for ids in chosen))


def held_out_domains(names: Sequence[str], tokenizer: TextTokenizer, *, prompts: int, tokens: int) -> list[Domain]:
    """Domains of the held-out files: of KINDS by their rule, ALL without one. ValueError as of `make_domain`."""
    texts = [split_text(text, tokenizer, with_kinds=names != [ALL]) for text in held_out_texts()]
    return [
        make_domain(name, texts, tokenizer, prompts=prompts, tokens=tokens, kind=None if name == ALL else name)
        for name in names
    ]


def domains_of_files(
    files: Sequence[tuple[str, Path]], tokenizer: TextTokenizer, *, prompts: int, tokens: int
) -> list[Domain]:
    """Domains of the user's texts by the names that they were given, any window of them. ValueError as above."""
    texts: dict[str, list[Lines]] = {}
    for name, path in files:
        texts.setdefault(name, []).append(split_text(read_text(path), tokenizer, with_kinds=False))
    return [make_domain(name, own, tokenizer, prompts=prompts, tokens=tokens) for name, own in texts.items()]
