"""The package list, and the rules about what which file may touch, read from the source."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = ("parallel", "layouts", "comm", "models", "launch", "benchmarks")
FORBIDDEN_MODULES = ("pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "torch.distributed.checkpoint")
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "torch.save",
    "torch.load",
    "multiprocessing.Queue",
    "multiprocessing.SimpleQueue",
    "dist.all_gather_object",
    "dist.gather_object",
    "dist.broadcast_object_list",
    "dist.scatter_object_list",
    "dist.send_object_list",
    "dist.recv_object_list",
}
GROUP_MAKERS = ("init_process_group", "new_group", "new_subgroups", "split_group", "init_device_mesh")
TORCH_FREE = ("parallel/topology.py", "parallel/ownership.py")


def _files() -> list[Path]:
    return [ROOT / "__init__.py", *sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))]


def _trees() -> Iterator[tuple[str, ast.Module]]:
    for path in _files():
        yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def _imports(tree: ast.AST) -> Iterator[str]:
    """Absolute imports: modules, and modules with the names taken from them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _calls(tree: ast.AST) -> Iterator[str]:
    return (ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call))


def _reads_environment(tree: ast.AST) -> bool:
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return bool(names & {"environ", "getenv"}) or any(
        name in ("os.environ", "os.getenv") for name in _imports(tree) if name.startswith("os.")
    )


def test_package_list_is_complete() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = project["tool"]["setuptools"]["packages"]
    folders = {path.parent.relative_to(ROOT).as_posix() for floor in FLOORS for path in (ROOT / floor).rglob("*.py")}
    assert sorted(listed) == sorted({"meshspark"} | {f"meshspark.{folder.replace('/', '.')}" for folder in folders})
    assert [folder for folder in folders if not (ROOT / folder / "__init__.py").exists()] == []


def test_device_extension_is_of_torchs_own_minor_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (torch_version,) = (need.split(">=")[1] for need in project["dependencies"] if need.startswith("torch>="))
    major, minor = map(int, torch_version.split(".")[:2])
    assert project["optional-dependencies"]["npu"] == [f"torch-npu>={major}.{minor},<{major}.{minor + 1}"]


def _installed_by(target: str) -> set[str]:
    """What pip installs before a target of the Makefile runs."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    found: set[str] = set()
    for head, recipe in re.findall(r"^(\S+:[^=\n]*)\n((?:\t.*\n)*)", text, flags=re.M):
        name, _, needed = head.partition("##")[0].partition(":")
        if name == target:
            found |= set(re.findall(r"install .*constraints.txt (.*)$", recipe, flags=re.M))
            found = found.union(*map(_installed_by, needed.split()))
    return found


def test_the_demo_installs_what_it_needs() -> None:
    assert _installed_by("demo") == {"torch", "-e ."}
    assert _installed_by("test") == {"torch", "-e .", "-e '.[test]'"}


def test_root_holds_one_python_file() -> None:
    assert [path.name for path in ROOT.glob("*.py")] == ["__init__.py"]
    assert not (ROOT / "tests" / "__init__.py").exists()


def test_test_files_are_flat() -> None:
    assert [path.name for path in (ROOT / "tests").rglob("test_*.py") if path.parent.name != "tests"] == []


@pytest.mark.parametrize("name", ["py.typed", "LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"])
def test_root_files_exist(name: str) -> None:
    assert (ROOT / name).exists()


def test_nothing_is_pickled_or_evaluated() -> None:
    found = []
    for name, tree in _trees():
        found += [f"{name}: {used}" for used in _imports(tree) if used.startswith(FORBIDDEN_MODULES)]
        found += [
            f"{name}: {used}" for used in _calls(tree) if used.replace("torch.distributed.", "dist.") in FORBIDDEN_CALLS
        ]
    assert found == []


def test_only_groups_makes_process_groups() -> None:
    users = {name for name, tree in _trees() if any(call.split(".")[-1] in GROUP_MAKERS for call in _calls(tree))}
    assert users == {"parallel/groups.py"}


def test_only_the_worker_reads_the_environment() -> None:
    # The doctor hands its own environment on to the ranks that it tries.
    users = {name for name, tree in _trees() if _reads_environment(tree)}
    assert {"launch/worker.py"} <= users <= {"launch/worker.py", "launch/doctor.py"}


def test_rank_arithmetic_imports_no_torch() -> None:
    trees = dict(_trees())
    assert {name for name in TORCH_FREE for used in _imports(trees[name]) if used.split(".")[0] == "torch"} == set()


def test_library_imports_itself_relatively() -> None:
    found = [name for name, tree in _trees() if any(used.split(".")[0] == "meshspark" for used in _imports(tree))]
    assert found == []


def test_source_is_ascii() -> None:
    paths = [*_files(), *(ROOT / "tests").glob("*.py")]
    assert [path.name for path in paths if not path.read_text(encoding="utf-8").isascii()] == []


def test_rules_are_seen() -> None:
    """The checks above can fail: each kind of sinner is recognised."""
    tree = ast.parse("import pickle\nfrom os import environ\nimport torch\ntorch.load('x')\ndist.new_group([0])")
    assert "pickle" in set(_imports(tree))
    assert {"torch.load", "dist.new_group"} <= set(_calls(tree))
    assert _reads_environment(tree)
    assert not _reads_environment(ast.parse("import os\nos.cpu_count()"))
