"""Which code runs, so that results of other code are not taken for its own."""

import contextlib
import hashlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.provenance import collect


def code_state(plugins: Sequence[str] = ()) -> dict[str, Any]:
    """Which code runs: the git commit around the current folder, a hash of what is not committed, our version, and a
    hash of each of ``plugins``, which need not be in that repository, or in any.
    """
    record = collect(command=[], seed=0, ranks=[])
    git = record["git"] or {}
    state = {
        "commit": git.get("commit"),
        "diff_sha256": git.get("diff_sha256"),
        "shardwise": record["versions"].get("shardwise"),
    }
    return {**state, "plugins": {name: _source_sha256(name) for name in plugins}} if plugins else state


def _source_sha256(package: str) -> str | None:
    """A hash of the Python files of a package, or of a module, found without importing it; None if it has none."""
    try:
        spec = importlib.util.find_spec(package.partition(".")[0])
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = [(path, str(path.relative_to(folder))) for folder in folders for path in folder.rglob("*.py")]
    if not folders and spec.origin and Path(spec.origin).is_file():
        files = [(Path(spec.origin), "")]
    digest = hashlib.sha256()
    for path, name in sorted(files, key=lambda file: file[1]):
        with contextlib.suppress(OSError):  # gone meanwhile, or not to be read
            digest.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest() if files else None


def shown_code(code: Any) -> str:
    """``commit 3f2a1bc with uncommitted changes 9ab31f0, shardwise 0.1.0, mynet 41d20ce``."""
    if not isinstance(code, dict):
        return "unknown code"
    commit, diff = code.get("commit"), code.get("diff_sha256")
    name = f"commit {str(commit)[:9]}" if commit else "no commit"
    changes = f" with uncommitted changes {str(diff)[:7]}" if diff else ""
    plugins = code.get("plugins")
    own = "".join(f", {key} {str(found)[:7]}" for key, found in (plugins if isinstance(plugins, dict) else {}).items())
    return f"{name}{changes}, shardwise {code.get('shardwise')}{own}"
