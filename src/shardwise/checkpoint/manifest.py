"""The manifest of a checkpoint: the file that is written last, says what the others hold, and makes them a checkpoint.

A checkpoint may come from a stranger: what is read here is checked key by key, and trusted with nothing.
"""

import json
import re
import time
from collections.abc import Mapping
from typing import Any

import xxhash

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
MAX_BYTES = 256 * 2**20
"""A manifest above this size is not read: a file of a hundred thousand ranks takes about 100 bytes of it."""
SEAL = "manifest_xxh3_128"
"""The manifest's checksum of itself: of the rest of it as JSON with sorted keys."""
NEWER = "this shardwise reads up to"

_NAME = re.compile(r"step_(\d{8,})((?:\.spare|\.partial|\.removed)?)")
_HEX = re.compile(r"[0-9a-f]{32}")


def step_name(step: int) -> str:
    """``step_00000100``: the name of the checkpoint after ``step`` optimizer steps."""
    return f"step_{step:08d}"


def split_name(name: str) -> tuple[int, str] | None:
    """``(100, ".partial")`` of ``step_00000100.partial``, and None of what is no name of a checkpoint."""
    match = _NAME.fullmatch(name)
    return None if match is None else (int(match[1]), match[2])


def step_of(name: str) -> int:
    """The step of a checkpoint's name, its suffix left out.

    Raises:
        ValueError: it is no name of a checkpoint.
    """
    parts = split_name(name)
    if parts is None:
        raise ValueError(f"{printable(name)} is no checkpoint's name: one is {step_name(100)}")
    return parts[0]


def printable(text: object) -> str:
    """``text`` with everything that a terminal obeys instead of showing it written out, such as ``\\x1b``."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def dump_manifest(manifest: Mapping[str, Any]) -> bytes:
    """The manifest as the bytes of its file, with format, time, and a checksum of itself."""
    plain = {"format_version": FORMAT_VERSION, "time": time.time(), **manifest}
    # Through JSON once, so that what is sealed is what will be read.
    plain = json.loads(json.dumps(plain))
    plain[SEAL] = _seal(plain)
    fault = _fault(plain)
    assert fault is None, fault
    return (json.dumps(plain, indent=1) + "\n").encode()


def parse_manifest(raw: bytes) -> tuple[dict[str, Any] | None, str | None]:
    """``(manifest, None)``, or ``(None, what is wrong with it)``."""
    if len(raw) > MAX_BYTES:
        return None, f"more than {MAX_BYTES} bytes, which no manifest has"
    if not raw:
        return None, "0 bytes: its contents are lost"
    try:
        plain = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError):
        return None, "cannot be read: it is no JSON"
    fault = _fault(plain)
    return (plain, None) if fault is None else (None, printable(fault))


def _seal(plain: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in plain.items() if key != SEAL}
    return xxhash.xxh3_128_hexdigest(json.dumps(rest, sort_keys=True).encode())


def _fault(plain: Any) -> str | None:
    if not isinstance(plain, dict):
        return f"holds a {type(plain).__name__}, a mapping is expected"
    # A newer format may change everything but the two keys that are looked at first.
    version, seal = plain.get("format_version"), plain.get(SEAL)
    try:
        intact = seal == _seal(plain)
    except (ValueError, RecursionError):  # surrogates that no UTF-8 has
        return "cannot be read: it holds text that is none"
    if not intact and (seal is not None or version == FORMAT_VERSION):
        return "checksum differs: it is not as it was written"
    if not isinstance(version, int) or not _is_whole(version, least=1):
        return "its format_version is no whole number above 0"
    if version > FORMAT_VERSION:
        return f"has format {version}, {NEWER} {FORMAT_VERSION}"
    expected = {
        "step": (_is_whole, "a whole number from 0"),
        "time": (_is_number, "a number"),
        "run_id": (_is_text, "a text"),
        "strategy": (_is_text, "a text"),
        "world_size": (_is_whole, "a whole number from 0"),
        "mesh": (_mapping_of(_is_whole), "a mapping of axes to sizes"),
        "metrics": (_mapping_of(_is_number), "a mapping of names to numbers"),
        "versions": (_mapping_of(_is_text), "a mapping of names to texts"),
    }
    for key, (holds, kind) in expected.items():
        if key in ("step", "time") and key not in plain:
            return f"has no {key}"
        if key in plain and not holds(plain[key]):
            return f"its {key} is not {kind}"
    files = plain.get("files")
    if not isinstance(files, dict) or not files:
        return "lists no files"
    for name, entry in files.items():
        if not stays_inside(name):
            return f"lists {name[:100]!r}, which is no file of this folder"
        if not isinstance(entry, dict) or not _is_whole(entry.get("bytes")):
            return f"gives no size for {name[:100]!r}"
        if not isinstance(digest := entry.get("xxh3_128"), str) or not _HEX.fullmatch(digest):
            return f"gives no checksum for {name[:100]!r}"
    return None


def stays_inside(name: str) -> bool:
    """Whether the file ``name`` of a folder is in it or below, whatever the file system; the manifest is none."""
    parts = name.split("/")
    return not ({"", ".", ".."} & set(parts) or set(name) & set("\\\0:") or name == MANIFEST) and len(name) < 1024


def _is_whole(value: Any, *, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: Any) -> bool:
    if isinstance(value, float):
        return True
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**1000


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _mapping_of(holds: Any) -> Any:
    return lambda value: isinstance(value, dict) and all(map(holds, value.values()))
