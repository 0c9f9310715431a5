"""A drafter out of a model hub's repository: config, index and the shards that hold mtp.*, nothing else."""

import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.reader import INDEX_NAME, CheckpointError, check_file_name, weight_map_of
from ..checkpoint.verify import CONFIG_NAME
from .variants import PREFIX

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Fetched:
    """A folder with the files of a repository, and the one around it in which their links end (None: itself)."""

    folder: Path
    root: Path | None


def is_repository(source: str) -> bool:
    """Whether a source names a repository and no folder: OWNER/NAME, where nothing of that path exists."""
    return _REPOSITORY.fullmatch(source) is not None and not Path(source).exists()


def fetch(repository: str, revision: str | None = None) -> Fetched:
    """Download what an import reads, into the hub's own cache.

    All files are of one commit: the one that the revision (a branch, tag or commit; None: the main branch) named when
    the first was fetched. ValueError where the extra `hub` is not installed; CheckpointError for what cannot be
    downloaded, for an index that names no mtp.*, or files outside of the repository's folder.
    """
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise ValueError(
            f"{repository} is no folder here; to read it as a hub's repository install the extra: "
            "pip install 'meshspark[hub]'"
        ) from error
    index = _download(hub, repository, INDEX_NAME, revision)
    folder = index.parent
    at = folder.name if _COMMIT.fullmatch(folder.name) else revision
    weight_map = weight_map_of(index, PREFIX)
    if not weight_map:
        raise CheckpointError(f"{repository}: its {INDEX_NAME} names no tensor {PREFIX}*")
    for name in [CONFIG_NAME, *sorted(set(weight_map.values()))]:
        check_file_name(name, repository)
        if _download(hub, repository, name, at).parent != folder:
            raise CheckpointError(f"{repository}: {name} was not put beside {INDEX_NAME} in {folder}")
    # The hub's cache holds snapshots of links to the files, and both in a folder of the repository's own.
    return Fetched(folder, folder.parents[1] if folder.parent.name == "snapshots" else folder)


def _download(hub: Any, repository: str, name: str, revision: str | None) -> Path:
    try:
        return Path(hub.hf_hub_download(repository, name, revision=revision))
    except Exception as error:  # The hub raises classes of its own, of its transport's and of the system's.
        raise CheckpointError(f"{repository}: {name} cannot be downloaded: {error}") from error
