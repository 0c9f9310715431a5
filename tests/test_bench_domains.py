"""Kinds of held-out text: the rule line by line, windows of whole lines, the same prompts on every run."""

from pathlib import Path

import pytest

from meshspark.benchmarks.domains import (
    ALL,
    KINDS,
    domains_of_files,
    held_out_domains,
    line_kinds,
    make_domain,
    read_text,
    split_text,
    windows,
)
from meshspark.launch import sample_data
from meshspark.launch.generate import SAMPLE
from meshspark.launch.tokenizer import TextTokenizer

SOURCE = '''"""A docstring

of three lines."""
import os

# A comment alone.
LIMIT = 5
NAMES = {
    "a": 1,   # one
    # between entries
    "b": -2.5, None: True,
    "c": os.sep,
}
TEXT = """words
of a text"""
def f(x):  # not alone
    'short docstring'
    return (x,
            3)
'''
KIND_OF_LINE = [
    "prose", None, "prose", "code", None, "prose", "tables", "code", "tables", "prose", "tables", "code", "code",
    "prose", "prose", "code", "prose", "code", "tables", None,
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer.load(SAMPLE, 1024)


def test_the_rule_line_by_line() -> None:
    assert line_kinds(SOURCE) == KIND_OF_LINE
    # A form feed ends no line, though str.splitlines has it so.
    assert line_kinds("A = 1\n\x0c\n# b\n") == ["tables", None, "prose", None]
    assert line_kinds("x = (\n") == [None, None] and line_kinds("if = 3\n")[0] == "code"
    assert line_kinds("pass\n") == ["code", None]


def test_windows_are_whole_lines_of_their_kind(tokenizer: TextTokenizer) -> None:
    text = "".join(f"    0x{n:02x}: 0x{n + 1:02x},\n" for n in range(30)).join(("T = {\n", "}\n"))
    text += "".join(f"# word {n} and more of them\n" for n in range(20))
    text += "".join(f"x{n} = f(y{n}) + g(z)\n" for n in range(20))
    lines = split_text(text, tokenizer, with_kinds=True)
    cut = {kind: windows(lines, 24, kind) for kind in (*KINDS, None)}
    assert all(len(ids) == 24 for found in cut.values() for ids in found)
    decoded = {kind: [tokenizer.decode(ids) for ids in found] for kind, found in cut.items()}
    assert all(":" in each and "#" not in each and "f(" not in each for each in decoded["tables"])
    assert all(each.lstrip().startswith("#") for each in decoded["prose"])
    assert all("f(" in each and ":" not in each for each in decoded["code"])
    assert all(len(found) >= 3 for found in decoded.values())
    for found in decoded.values():
        places = [text.index(found[0])]
        for each in found[1:]:
            places.append(text.index(each, places[-1] + 1))
        # One behind the other, each from the begin of a line, where the blanks before it belong to the line's break.
        assert all(b >= a + len(each) for a, b, each in zip(places, places[1:], found, strict=False))
        assert all(text[text.rindex("\n", 0, at) + 1 : at].strip() == "" for at in places if at)
    assert not windows(lines, 10**6)


def test_a_share_of_other_lines_is_borne(tokenizer: TextTokenizer) -> None:
    lines = split_text("# a\n" * 4 + "x = f()\n" + "# a\n" * 3 + "y = g()\n", tokenizer, with_kinds=True)
    assert lines.is_of("prose", 0, 5) and not lines.is_of("prose", 0, 9) and not lines.is_of("code", 0, 5)
    blank = split_text("\n\n\n", tokenizer, with_kinds=True)
    assert not any(blank.is_of(kind, 0, 3) for kind in KINDS)


def test_prompts_are_spread_and_begin_as_texts_do(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    texts = [
        split_text("".join(f"line {n} of {name}\n" for n in range(60)), tokenizer, with_kinds=False) for name in "ab"
    ]
    domain = make_domain("x", texts, tokenizer, prompts=4, tokens=12)
    assert [len(ids) for ids in domain.prompts] == [12] * 4 and len(set(domain.prompts)) == 4
    assert {ids[0] for ids in domain.prompts} == {tokenizer.bos_id}
    assert ["of a" in tokenizer.decode(ids) for ids in domain.prompts] == [True, True, False, False]
    with pytest.raises(ValueError, match=r"x has \d+ windows of 12 tokens, needed: 500"):
        make_domain("x", texts, tokenizer, prompts=500, tokens=12)
    with pytest.raises(ValueError, match="prompts have 1 tokens, allowed: at least 2"):
        make_domain("x", texts, tokenizer, prompts=1, tokens=1)
    (tmp_path / "one").write_text("some words\n" * 50)
    (tmp_path / "two").write_text("others\n" * 50)
    files = [("new", tmp_path / "one"), ("old", tmp_path / "two"), ("new", tmp_path / "two")]
    found = domains_of_files(files, tokenizer, prompts=3, tokens=6)
    assert [each.name for each in found] == ["new", "old"]
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for wrong in ("bytes", "nowhere"):
        with pytest.raises(ValueError, match=f"--text .*{wrong}"):
            read_text(tmp_path / wrong)


def test_only_held_out_files_are_read(
    tokenizer: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"m{n}.py" for n in range(200)]
    held = [name for name in names if sample_data.is_held_out(name)]
    for name in names:
        (tmp_path / name).write_text(SOURCE * 6 if name in held else "learned = 1\n" * 99)
    monkeypatch.setattr(sample_data.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert [name for name, _ in sample_data.source_files(sample_data.is_held_out)] == sorted(held)
    domains = held_out_domains((ALL, "code"), tokenizer, prompts=2, tokens=8)
    assert [each.name for each in domains] == [ALL, "code"]
    assert domains == held_out_domains((ALL, "code"), tokenizer, prompts=2, tokens=8)
    assert all("learned" not in tokenizer.decode(ids) for each in domains for ids in each.prompts)
