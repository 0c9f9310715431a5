"""README and docs tell the truth: code runs, commands exist, links and names resolve."""

import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
OUTPUTS = ("demo", "bench", "drafts")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.M | re.S)


def _commands() -> list[list[str]]:
    lines = [line for block in _blocks("sh") for line in block.replace("\\\n", " ").splitlines()]
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


def _make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))


def test_python_example_runs(tmp_path: Path) -> None:
    (example,) = _blocks("python")
    # Elsewhere than the checkout, as a reader would.
    done = subprocess.run(
        [sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 8 and lines[-1].endswith("length"), done.stdout


def test_make_targets_exist() -> None:
    named = {words[1] for words in _commands() if words[0] == "make"}
    assert {"demo", "test"} <= named <= _make_targets()
    assert _make_targets() == {"help", "demo", "test", "test-all", "lint", "type", "bench"}


def test_ci_and_make_run_the_test_command() -> None:
    (words,) = (words for words in _commands() if "pytest" in words)
    command = " ".join(words)
    assert command == "python -m pytest tests"
    assert command.replace("python", '"$bin/python"', 1) in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert command.replace("python", "$(BIN)/python", 1) in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_named_modules_exist() -> None:
    modules = {word for words in _commands() for word in words if word.startswith("meshspark.")}
    assert modules
    assert {module for module in modules if find_spec(module) is None} == set()


def _cli_commands() -> list[list[str]]:
    """Arguments of `meshspark` in README, docs and Makefile, and of `-m meshspark.launch.VERB` as those of the verb."""
    quoted = [line for path in DOCUMENTS for line in re.findall(r"^ {4}(meshspark .*)$", path.read_text(), flags=re.M)]
    inline = [line for path in DOCUMENTS for line in re.findall(r"`(meshspark [^`]+)`", path.read_text())]
    make = (ROOT / "Makefile").read_text(encoding="utf-8")
    drafting = re.findall(r"^DRAFTING := (.*)$", make, flags=re.M)[0]
    recipes = [
        r.replace("$(DRAFTING)", drafting) for r in re.findall(r"^\t\$\(BIN\)/(meshspark .*)$", make, flags=re.M)
    ]
    commands = [*_commands(), *map(shlex.split, quoted + inline + recipes)]
    found = []
    for words in commands:
        module = next((word for word in words if word.startswith("meshspark.launch.")), None)
        if words[0] == "meshspark":
            found.append(words[1:])
        elif module is not None:
            found.append([module.split(".")[-1], *words[words.index(module) + 1 :]])
    return found


def test_commands_have_their_verbs_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    from meshspark.launch import continuations
    from meshspark.launch.cli import main

    verbs = {"checkpoint": 2, "bench": 2, "fixture": 2, "convert": 2}
    commands = _cli_commands()
    assert {command[0] for command in commands} >= {"generate", "doctor", "checkpoint"}
    for command in commands:
        with pytest.raises(SystemExit) as end:
            words = 3 if command[:2] == ["convert", "dspark"] else verbs.get(command[0], 1)
            if command[0] == "continuations":
                continuations.main(["--help"])
            main([*command[:words], "--help"])
        assert end.value.code in (0, None), command
        help_text = capsys.readouterr().out
        assert [word for word in command if word.startswith("--") and word not in help_text] == [], command


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_resolve(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text(encoding="utf-8"))
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_files_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    named = set(re.findall(r"\b(?:parallel|layouts|comm|models|launch|tests|docs)/[\w/]+\.(?:py|md)\b", text))
    assert {name for name in named if not (ROOT / name).exists()} == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_functions_exist(document: Path) -> None:
    """Names in code quotes followed by their file: `name` (file.py)."""
    text = document.read_text(encoding="utf-8")
    for name, file in re.findall(r"`(?:\w+\.)?(\w+)(?:\([^`]*\))?`,? \(([\w/]+\.py)\)", text):
        candidates = [path for path in ROOT.glob(f"*/**/{file.split('/')[-1]}") if path.as_posix().endswith(file)]
        assert any(re.search(rf"\b{name}\b", path.read_text(encoding="utf-8")) for path in candidates), (name, file)


def test_places_for_output_are_kept() -> None:
    for name in OUTPUTS:
        assert f"<!-- output:{name} -->" in README and f"<!-- /output:{name} -->" in README
