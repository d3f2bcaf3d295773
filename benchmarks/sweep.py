"""Jobs per minute of a sweep of small jobs in two slots, over the same jobs as separate commands, one by one."""

import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TRAIN = [sys.executable, str(ROOT / "train.py")]
JOB = ["trainer.max_steps=150", "logger=none", "trainer.enable_progress_bar=false"]
JOBS = 16


def seconds(commands: list[list[str]], cwd: str) -> float:
    """Wall-clock seconds of commands that run one after the other."""
    start = time.perf_counter()
    for command in commands:
        subprocess.run(command, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=True)
    return time.perf_counter() - start


def measure(rounds: int, cwd: str, *, jobs: int = JOBS) -> dict[str, Any]:
    """Median seconds of both, and the ratio within each round."""
    sweep = [[*TRAIN, "-m", *JOB, f"seed={','.join(map(str, range(jobs)))}", "sweep.slots=2"]]
    apart = [[*TRAIN, *JOB, f"seed={seed}"] for seed in range(jobs)]
    times: dict[str, list[float]] = {"sweep": [], "apart": []}
    for number in range(rounds):
        folder = Path(cwd) / f"sweep_{number}"
        folder.mkdir()
        for name, commands in (("sweep", sweep), ("apart", apart)):
            times[name].append(seconds(commands, str(folder)))
        shutil.rmtree(folder)
    ratios = sorted(a / b for a, b in zip(times["apart"], times["sweep"], strict=True))
    row = {
        "jobs": jobs,
        "sweep s": statistics.median(times["sweep"]),
        "apart s": statistics.median(times["apart"]),
        "ratio": (ratios[0], statistics.median(ratios), ratios[-1]),
    }
    print(row, flush=True)
    return row
