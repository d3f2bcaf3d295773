"""How long a report over many runs takes, and how much memory: run folders made up, the command as a user types it."""

import json
import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RUNS, STEPS = 500, 1000
BATCHES = (16, 32, 64, 128, 256, 512, 1024)
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
CONFIG = """\
seed: {seed}
output_root: outputs
trainer:
  max_epochs: null
  max_steps: {steps}
  log_every_n_steps: 1
strategy:
  name: ddp
  tp: 1
batch:
  global_size: {batch}
  micro_size: null
schedule:
  kind: cosine
  warmup_steps: {warmup}
lr_scaling:
  rule: {rule}
  base_batch_size: 64
task:
  _target_: shardwise.module.Classification
model:
  _target_: shardwise.models.mlp.MLP
  width: 64
data:
  _target_: shardwise.data.digits.Digits
optimizer:
  _target_: torch.optim.AdamW
  lr: {lr}
  betas: [0.9, 0.999]
derived:
  world_size: 1
  dp_size: 1
  batch_global_size: {batch}
  base_lr: {lr}
  effective_lr: {effective}
"""


def write_run(folder: Path, *, steps: int, batch: int, lr: float, rule: str, warmup: int, seed: int) -> None:
    """A run folder as a training would have left it, a line of metrics a step, a validation every fifty."""
    folder.mkdir(parents=True)
    effective = lr * {"none": 1.0, "linear": batch / 64, "sqrt": math.sqrt(batch / 64)}[rule]
    values = {"seed": seed, "steps": steps, "batch": batch, "lr": lr, "rule": rule, "warmup": warmup}
    (folder / "config.yaml").write_text(CONFIG.format(**values, effective=effective))
    typed = {
        "batch.global_size": batch,
        "optimizer.lr": lr,
        "lr_scaling": rule,
        "schedule.warmup_steps": warmup,
        "seed": seed,
    }
    (folder / "overrides.yaml").write_text("".join(f"- {key}={value}\n" for key, value in typed.items()))
    (folder / "provenance.json").write_text(json.dumps({"command": ["python", "train.py", "-m", "sweep=synthetic"]}))
    draw, now, noise = random.Random(repr(typed)), 1.7e9, 300.0
    # Each step learns as much as its rate and its batch allow; too high a rate for the batch ends badly.
    fit = math.exp(-((math.log(effective / 0.008 / (batch / (batch + noise) * 4) ** 0.5) / 1.6) ** 2))
    if warmup == 0 and effective > 0.03:
        fit *= 0.6
    pace = 0.02 * fit * batch / (batch + noise) * (noise / 64)
    metrics: dict[str, Any] = {}
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            now += 0.004 + batch * 2e-5
            clean = 0.05 + 2.25 * math.exp(-pace * step) + 1.0 / (1 + step)
            metrics = {"train/loss": clean * (1 + draw.gauss(0, 0.5 / math.sqrt(batch)))}
            metrics |= {"lr": effective, "samples": step * batch, "samples_per_second": batch / 0.005}
            file.write(json.dumps({"step": step, "time": round(now, 3), **metrics}) + "\n")
            if step % 50 == 0 or step == steps:
                valued = {"val/loss": clean * 1.1 + draw.gauss(0, 0.01), "val/accuracy": 1 - 0.4 * clean}
                file.write(json.dumps({"step": step, "time": round(now, 3), **valued}) + "\n")
                metrics |= valued
        metrics["noise_scale/critical_batch_size"] = noise * draw.uniform(0.9, 1.1)
        metrics["test/accuracy"] = max(0.1, min(1.0, 1 - 0.4 * clean + draw.gauss(0, 0.004)))
        file.write(json.dumps({"step": steps, "time": round(now, 3), "test/accuracy": metrics["test/accuracy"]}) + "\n")
    result = {"status": "completed", "run_id": folder.name, "steps": steps, "metrics": metrics, "seconds": now - 1.7e9}
    (folder / "result.json").write_text(json.dumps(result))


def write_runs(root: Path, *, runs: int, steps: int) -> None:
    """``runs`` run folders: a grid of batch sizes, rates, rules and warm-ups, then of seeds."""
    grid = [(w, rule, lr, b) for w in (0, 50) for rule in ("none", "linear", "sqrt") for lr in RATES for b in BATCHES]
    for at in range(runs):
        warmup, rule, lr, batch = grid[at % len(grid)]
        values = {"steps": steps, "batch": batch, "lr": lr, "rule": rule, "warmup": warmup, "seed": at // len(grid)}
        write_run(root / "synthetic" / f"run-{at:04d}", **values)  # type: ignore[arg-type]


def measure(rounds: int, folder: str) -> list[dict[str, Any]]:
    """A row: seconds from the command to its end and seconds of processors (smallest, median, largest), peak MiB."""
    root, page = Path(folder) / "runs", Path(folder) / "page"
    write_runs(root, runs=RUNS, steps=STEPS)
    command = [sys.executable, "-m", "shardwise", "report", str(root), "--to", str(page)]
    seconds, busy, peaks = [], [], []
    for _ in range(rounds):
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)  # the resources of this one child
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
        seconds.append(time.perf_counter() - start)
        busy.append(used.ru_utime + used.ru_stime)
        peaks.append(used.ru_maxrss / 1024)
    row = {"runs": RUNS, "steps": STEPS, "seconds": _spread(seconds), "processor seconds": _spread(busy)}
    return [{**row, "peak MiB": max(peaks), "page MiB": (page / "report.html").stat().st_size / 2**20}]


def _spread(values: list[float]) -> tuple[float, float, float]:
    ordered = sorted(values)
    return ordered[0], ordered[len(ordered) // 2], ordered[-1]
