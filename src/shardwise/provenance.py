"""Where a run comes from: code, versions, machines; and the filter that keeps secrets out of everything that is kept.

Nothing here imports torch at module level: the filter is also used before torch is loaded.
"""

import hashlib
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

MASK = "***"
MAX_DIFF_BYTES = 1_000_000
PACKAGES = (
    *("shardwise", "torch", "torchvision", "pytorch-lightning", "torchmetrics"),
    *("hydra-core", "omegaconf", "wandb", "numpy", "tokenizers", "timm"),
)
"""The distributions whose versions can change a run's numbers or its folder."""

ENVIRONMENT = re.compile(
    r"OMP_\w+|MKL_\w+|KMP_\w+|CUDA_\w+|CUBLAS_WORKSPACE_CONFIG|NVIDIA_VISIBLE_DEVICES|NCCL_\w+|GLOO_\w+|TORCH_\w+|TORCHINDUCTOR_\w+"
    r"|PYTORCH_\w+|PYTHONHASHSEED|LOCAL_WORLD_SIZE|SLURM_(JOB_ID|JOB_NAME|NNODES|NTASKS|CPUS_PER_TASK)|WANDB_MODE"
)
"""The environment variables that are recorded; no other is."""

# Words of a key, such as HF_TOKEN, api_key or dbPassword, that make its value a secret...
_SECRET_WORDS = {"password", "passwords", "passwd", "passphrase", "secret", "secrets", "credential", "credentials"}
_SECRET_WORDS |= {"apikey", "accesskey", "authtoken", "accesstoken"}
_SECRET_PAIRS = {("api", "key"), ("access", "key"), ("private", "key"), ("secret", "key"), ("auth", "key")}
# ... unless it says where the secret is, or the token is one of a vocabulary: eos_token, pad_token_id.
_PLACE_WORDS = {"file", "path", "dir", "folder"}
_VOCABULARY_WORDS = {"pad", "eos", "bos", "unk", "cls", "sep", "mask", "sot", "eot", "class", "special", "start", "end"}
_VOCABULARY_WORDS |= {"prefix", "suffix", "image", "per", "id"}
_NO_VALUE = {"", "null", "none", "true", "false", MASK}
# What follows `key:` or `key =` in code and is a type, not a value.
_CODE_WORDS = {"str", "int", "float", "bool", "bytes", "any", "optional", "self"}

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_URL_USER = re.compile(r"(?P<scheme>\b[A-Za-z][A-Za-z0-9+.\-]*://)[^/\s'\"]+@")
_VALUE = r"(?P<value>\"[^\"\n]*\"|'[^'\n]*'|[^\s,;&'\"()\[\]{}<>]++(?![(\[]))"
# key=value, key: value, "key": "value"; not key=call(...) or key: list[...]. And --key value.
_ASSIGNMENT = re.compile(r"(?P<key>[A-Za-z_][\w.\-]*)(?P<sign>['\"]?\s*[:=]\s*)" + _VALUE)
_OPTION = re.compile(r"(?<=--)(?P<key>[A-Za-z_][\w.\-]*)(?P<sign>\s+)" + _VALUE)
_BEARER = re.compile(r"(?P<scheme>\b(?:Bearer|Basic)\s+)[A-Za-z0-9._~+/=\-]{8,}")
_KNOWN_SHAPES = re.compile(  # of Hugging Face, GitHub, GitLab, OpenAI and the like, AWS, Slack, and W&B
    r"\b(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w\-]{16,}|sk-[\w\-]{20,}"
    r"|AKIA[A-Z0-9]{16}|xox[abprs]-[\w\-]{10,}|wandb_v\d_\w{20,})"
)


def is_secret_key(key: str) -> bool:
    """Whether a name is that of a secret, as `logger.api_key` and `HF_TOKEN`; `eos_token` and `data.tokens` are not."""
    return any(_is_secret_name(part) for part in str(key).split("."))


def _is_secret_name(name: str) -> bool:
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or words[-1] in _PLACE_WORDS:
        return False
    if _SECRET_WORDS & set(words) or _SECRET_PAIRS & set(pairwise(words)):
        return True
    return "token" in words and not _VOCABULARY_WORDS & set(words)


def without_secrets(value: Any) -> Any:
    """A copy of a configuration, a list of overrides or arguments, or a text, in which every secret is `***`.

    Secrets are: what stands under the keys of is_secret_key, the user part of URLs (`https://user:pass@host`), values
    of this process's environment variables with such names, and texts in the shape of well-known access tokens. Keys,
    numbers under `token`, interpolations and everything else stay as they are. Mappings become dicts.
    """
    return _filtered(value, _environment_secrets())


def _filtered(value: Any, known: Sequence[str]) -> Any:
    if isinstance(value, str):
        return _filtered_text(value, known)
    if isinstance(value, Mapping):
        return {
            key: _masked(item, key) if is_secret_key(str(key)) else _filtered(item, known)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        items: list[Any] = []
        for item in value:
            if items and isinstance(value[len(items) - 1], str) and _is_secret_option(value[len(items) - 1]):
                items.append(_masked(item, "password"))  # the argument after --api-key
            else:
                items.append(_filtered_argument(item, known) if isinstance(item, str) else _filtered(item, known))
        return type(value)(items) if type(value) in (list, tuple) else items
    return value


def _masked(value: Any, key: Any) -> Any:
    """The mask in place of everything under a secret key that could be a secret."""
    if isinstance(value, Mapping):
        return {inner: _masked(item, key) for inner, item in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(item, key) for item in value]
    if value is None or isinstance(value, bool) or (isinstance(value, str) and _is_harmless(value)):
        return value
    if isinstance(value, int | float) and "token" in str(key).lower():
        return value
    return MASK


def _is_harmless(text: str) -> bool:
    """Whether a text under a secret key is none: nothing, or an interpolation such as `${oc.env:WANDB_API_KEY}`."""
    inner = text.strip("'\"")
    return inner.lower() in _NO_VALUE or re.fullmatch(r"\$\{[^{}]*\}", inner) is not None


def _is_secret_option(argument: str) -> bool:
    return argument.startswith("-") and "=" not in argument and is_secret_key(argument.replace("-", "_"))


def _filtered_argument(argument: str, known: Sequence[str]) -> str:
    """One word of a command line: behind `key=` of a secret everything goes, whatever characters it has."""
    key, sign, rest = argument.partition("=")
    if sign and is_secret_key(key):
        return argument if _is_harmless(rest) else f"{key}={MASK}"
    return _filtered_text(argument, known)


def _filtered_text(text: str, known: Sequence[str]) -> str:
    for secret in known:
        text = text.replace(secret, MASK)
    text = _URL_USER.sub(rf"\g<scheme>{MASK}@", text)
    text = _BEARER.sub(rf"\g<scheme>{MASK}", text)
    text = _KNOWN_SHAPES.sub(MASK, text)
    return _OPTION.sub(_mask_assignment, _ASSIGNMENT.sub(_mask_assignment, text))


def _mask_assignment(match: re.Match[str]) -> str:
    value = match["value"]
    quote = value[0] if value[0] in "'\"" else ""
    inner = value.strip(quote) if quote else value
    if (
        not is_secret_key(match["key"])
        or inner.lower() in _CODE_WORDS
        or _is_harmless(inner)
        or _masked(_number(inner), match["key"]) != MASK
    ):
        return match[0]
    return f"{match['key']}{match['sign']}{quote}{MASK}{quote}"


def _number(text: str) -> Any:
    return float(text) if re.fullmatch(r"[+-]?\d+(\.\d*)?", text) else text


def _environment_secrets() -> list[str]:
    """The values of the environment that are secret by their name, the longest first."""
    values = {value for key, value in os.environ.items() if len(value) >= 8 and is_secret_key(key)}
    return sorted(values, key=len, reverse=True)


def collect(*, command: Sequence[str], seed: int, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Everything that is needed to tell what ran, in plain values for JSON, without secrets.

    Args:
        command: the command line, such as sys.argv.
        seed: the run's seed.
        ranks: one dict per rank, such as {"rank": 0, "node": 0, "host": "n1", "dp": 0, "tp": 0}.

    The code is that of the git repository around the current folder, if there is one and git is installed: commit, the
    diff of tracked files (at most MAX_DIFF_BYTES), its hash, and the names of new Python files. Accelerators are those
    of this process.
    """
    hosts = sorted({str(rank["host"]) for rank in ranks if "host" in rank}) or [socket.gethostname()]
    record = {
        "command": list(command),
        "start_time": datetime.now(UTC).isoformat(timespec="seconds"),
        "folder": str(Path.cwd()),
        "seed": seed,
        "git": _git(),
        "versions": _versions(),
        "hosts": hosts,
        "platform": platform.platform(),
        "cpu": _cpu(),
        "accelerators": _accelerators(),
        "environment": {key: value for key, value in sorted(os.environ.items()) if ENVIRONMENT.fullmatch(key)},
        "ranks": ranks,
    }
    return without_secrets(record)


def with_attempts(record: Mapping[str, Any], earlier: Any) -> dict[str, Any]:
    """The record of a run that continues, with those of its earlier attempts under ``attempts``, the oldest first.

    ``earlier`` is what its ``provenance.json`` holds, or anything else where that is damaged. Of changes to the code
    that the next attempt still had, an earlier one keeps the hash only.
    """
    if not isinstance(earlier, Mapping):
        return dict(record)
    before = earlier.get("attempts")
    attempts = [dict(one) for one in before if isinstance(one, Mapping)] if isinstance(before, list) else []
    last = {key: value for key, value in earlier.items() if key != "attempts"}
    git, now = _mapping(last.get("git")), _mapping(record.get("git"))
    if git.get("diff_sha256") is not None and git.get("diff_sha256") == now.get("diff_sha256"):
        last["git"] = {key: value for key, value in git.items() if key != "diff"}
    return {**record, "attempts": [*attempts, last]}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """One line per thing in code, versions or hardware that differs between two records of collect, the code first.

    A record may be older than this program, or come from a stranger: what is missing counts as unknown.
    """
    lines = []
    old_git, new_git = _mapping(old.get("git")), _mapping(new.get("git"))
    if old_git.get("commit") != new_git.get("commit"):
        lines.append(f"git commit: {_shown(old_git.get('commit'))} -> {_shown(new_git.get('commit'))}")
    if old_git.get("diff_sha256") != new_git.get("diff_sha256"):
        lines.append(f"uncommitted changes: {_changes(old_git)} -> {_changes(new_git)}")
    old_versions, new_versions = _mapping(old.get("versions")), _mapping(new.get("versions"))
    for package in dict.fromkeys([*new_versions, *old_versions]):
        before, after = old_versions.get(package), new_versions.get(package)
        if before != after:
            lines.append(f"{_shown(package)}: {_shown(before)} -> {_shown(after)}")
    for key in ("platform", "cpu", "accelerators"):
        before, after = _hardware(old.get(key)), _hardware(new.get(key))
        if before != after:
            lines.append(f"{key}: {before} -> {after}")
    return lines


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _shown(value: Any) -> str:
    """A value from a file on one short line."""
    if value is None:
        return "none"
    text = "".join(character if character.isprintable() else " " for character in str(value))
    return text if len(text) <= 100 else text[:97] + "..."


def _changes(git: Mapping[str, Any]) -> str:
    diff = git.get("diff") or ""
    return f"{len(str(diff).splitlines())} lines of diff" if diff else "none"


def _hardware(value: Any) -> str:
    if isinstance(value, list | tuple):
        names = [_shown(item) for item in value]
        return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{_shown(item)} {_shown(key)}" for key, item in value.items())
    return _shown(value)


def _git() -> dict[str, Any] | None:
    """None without git or outside a repository."""
    root = _git_output("rev-parse", "--show-toplevel")
    if root is None:
        return None
    commit = _git_output("rev-parse", "--verify", "--quiet", "HEAD")
    # Drivers and filters of the user's configuration would run programs and hide changes.
    diff = (_git_output("diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD") if commit else None) or ""
    untracked = _git_output("ls-files", "--others", "--exclude-standard", "--full-name", ":(top)*.py") or ""
    kept = diff.encode()[:MAX_DIFF_BYTES].decode(errors="ignore")
    return {
        "commit": commit.strip() if commit else None,
        "dirty": bool(diff),
        "diff": without_secrets(kept),
        "diff_sha256": hashlib.sha256(diff.encode()).hexdigest() if diff else None,
        "diff_truncated": len(kept) < len(diff),
        "untracked": untracked.splitlines()[:100],
    }


def _git_output(*arguments: str) -> str | None:
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    try:
        result = subprocess.run(
            ["git", *arguments], capture_output=True, timeout=20, env=environment, stdin=subprocess.DEVNULL, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.decode(errors="replace") if result.returncode == 0 else None


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _cpu() -> dict[str, Any]:
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.lower().startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"model": model, "cores": cores}


def _accelerators() -> list[str]:
    """The names of this process's accelerators. Without torch in the process nothing runs on one, and it stays out."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
