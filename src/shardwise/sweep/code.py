"""Which code runs, so that results of other code are not taken for its own."""

from typing import Any

from shardwise.provenance import collect


def code_state() -> dict[str, Any]:
    """Which code runs: the git commit around the current folder, a hash of what is not committed, and our version."""
    record = collect(command=[], seed=0, ranks=[])
    git = record["git"] or {}
    return {
        "commit": git.get("commit"),
        "diff_sha256": git.get("diff_sha256"),
        "shardwise": record["versions"].get("shardwise"),
    }


def shown_code(code: Any) -> str:
    """``commit 3f2a1bc with uncommitted changes 9ab31f0``, or the version where there is no commit."""
    if not isinstance(code, dict):
        return "unknown code"
    commit, diff = code.get("commit"), code.get("diff_sha256")
    name = f"commit {str(commit)[:9]}" if commit else "no commit"
    changes = f" with uncommitted changes {str(diff)[:7]}" if diff else ""
    return f"{name}{changes}, shardwise {code.get('shardwise')}"
