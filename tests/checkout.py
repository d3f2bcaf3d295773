"""This checkout, and what a run of its train.py leaves."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class TrainRun:
    """One finished `python train.py ...` and what it left behind."""

    returncode: int
    stdout: str
    stderr: str
    output_root: Path

    @cached_property
    def run_folders(self) -> list[Path]:
        """All run folders below the output root, the oldest first."""
        configs = sorted(self.output_root.rglob("config.yaml"), key=lambda path: path.stat().st_mtime_ns)
        return [path.parent for path in configs]

    @property
    def run_folder(self) -> Path:
        """The newest run folder."""
        assert self.run_folders, f"no run folder below {self.output_root}\n{self}"
        return self.run_folders[-1]

    @property
    def result(self) -> dict[str, Any]:
        """`result.json` of the newest run folder."""
        result = json.loads((self.run_folder / "result.json").read_text())
        assert isinstance(result, dict)
        return result

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl` of the newest run folder."""
        return [json.loads(line) for line in (self.run_folder / "metrics.jsonl").read_text().splitlines()]

    def __str__(self) -> str:
        return f"exit status {self.returncode}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"
