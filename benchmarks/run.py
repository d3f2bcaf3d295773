"""Measure everything that the README's table claims, and write ``RESULTS.md``: `make bench`.

python benchmarks/run.py [--rounds 9] [--only startup|tax|tp|checkpoints|noise|report|sweep|telemetry]
"""

import argparse
import os
import platform
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])


def _spread(ratios: tuple[float, float, float]) -> str:
    return f"{ratios[1]:.2f} ({ratios[0]:.2f} to {ratios[2]:.2f})"


def _checkpoints(rows: dict[str, list[dict]]) -> list[str]:
    said = "How long training stops for a save in the background, over copying what a rank holds; and a step meanwhile."
    lines = ["", "## Checkpoints", "", said, ""]
    lines += ["| layout | processes | copying, ms | stop | the first stop, over copies in new memory | step |"]
    lines += ["|---|---|---|---|---|---|"]
    for row in rows["stop"]:
        lines.append(
            f"| {row['layout']} | {row['processes']} | {row['copy ms']:.1f} | {_spread(row['stop'])} "
            f"| {_spread(row['first stop'])} | {_spread(row['step beside a save'])} |"
        )
    lines += ["", "Throughput over plain torch.distributed.checkpoint; ours also verifies and publishes."]
    columns = ("state", "processes", "file system", "MB a rank", "plain save, s", "save", "plain load, s", "load")
    lines += ["", f"| {' | '.join(columns)} | verifying every byte, over the load |"]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    for row in rows["throughput"]:
        lines.append(
            f"| {row['state']} | {row['processes']} | {row['disk']} | {row['MB a rank']:.0f} "
            f"| {row['plain save s']:.2f} | {_spread(row['save'])} "
            f"| {row['plain load s']:.2f} | {_spread(row['load'])} | {_spread(row['verify'])} |"
        )
    lines += ["", "Largest resident memory of a rank that loads, over its share and the largest single parameter.", ""]
    lines += ["| saved | loaded | processes | share and largest, MB | resident |", "|---|---|---|---|---|"]
    for row in rows["memory"]:
        lines.append(
            f"| {row['saved']} | {row['loaded']} | {row['processes']} | {row['MB']:.0f} | {_spread(row['ratio'])} |"
        )
    return lines


def _noise(rows: list[dict], *, every: int) -> list[str]:
    said = "Time of an optimizer step with the callback that measures it, over the time without."
    lines = ["", "## Gradient noise scale", "", said, ""]
    lines += [f"| model | processes | step, ms | a measured step | mean step, one in {every} measured |"]
    lines += ["|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row['model']} | {row['processes']} | {row['ms'][1]:.1f} | {_spread(row['measured'])} "
            f"| {row['mean'][1]:.3f} ({row['mean'][0]:.3f} to {row['mean'][2]:.3f}) |"
        )
    return lines


def _report(rows: list[dict]) -> list[str]:
    said = "`python -m shardwise report` over runs made up, from the command to its end, imports included."
    lines = ["", "## Reports", "", said, ""]
    lines += ["| runs | steps each | seconds | seconds of one core | peak memory, MiB | page, MiB |"]
    lines += ["|---|---|---|---|---|---|"]
    for row in rows:
        low, middle, high = row["seconds"]
        lines.append(
            f"| {row['runs']} | {row['steps']} | {middle:.1f} ({low:.1f} to {high:.1f}) "
            f"| {row['processor seconds'][1]:.1f} | {row['peak MiB']:.0f} | {row['page MiB']:.1f} |"
        )
    return lines


def _sweep(row: dict) -> list[str]:
    said = f"Jobs per minute of {row['jobs']} small jobs as a sweep with sweep.slots=2, over as many separate commands."
    lines = ["", "## Sweeps", "", said, "", "| the sweep, s | one after the other, s | jobs per minute |"]
    return [*lines, "|---|---|---|", f"| {row['sweep s']:.0f} | {row['apart s']:.0f} | {_spread(row['ratio'])} |"]


def _telemetry(rows: dict) -> list[str]:
    said = (
        "Time inside what measures and logs, over a step of 40 ms at 4 ranks, W&B (offline) included: computing, and "
        "with waiting for the other ranks in its one collective, where ranks that share cores are behind."
    )
    columns = ("logged", "computing, ms", "with waiting, ms", "step clock, ms", "collectives", "share", "with waiting")
    lines = ["", "## Telemetry", "", said, "", f"| {' | '.join(columns)} |", "|---|---|---|---|---|---|---|"]
    for row in rows["inside"]:
        shares = [
            f"{100 * row[name][1]:.2f} % ({100 * row[name][0]:.2f} to {100 * row[name][2]:.2f})"
            for name in ("share", "share with waiting")
        ]
        lines.append(
            f"| every {row['every']} | {row['of it computing ms']:.2f} | {row['logging step ms']:.2f} "
            f"| {row['clock ms']:.3f} | {row['collectives a logging step']:.0f} | {' | '.join(shares)} |"
        )
    row = rows["simulated"]
    lines += ["", f"{row['ranks']:,} ranks made up, {row['quantities']} quantities each, on rank 0; milliseconds.", ""]
    lines += ["| payload, KiB | statistics | files | W&B | all | largest |", "|---|---|---|---|---|---|"]
    kinds = ("statistics ms", "files ms", "wandb ms", "all ms", "largest ms")
    return [*lines, f"| {row['payload KiB']:.0f} | " + " | ".join(f"{row[kind]:.1f}" for kind in kinds) + " |"]


def main() -> int:
    """Measure, print, write."""
    import checkpoints
    import framework_tax
    import noise_scale
    import report
    import startup
    import sweep
    import telemetry
    import tensor_parallel

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="times that every arm is run")
    parts = ("startup", "tax", "tp", "checkpoints", "noise", "report", "sweep", "telemetry")
    parser.add_argument("--only", choices=parts, help="one of these")
    options = parser.parse_args()
    packages = ("torch", "pytorch-lightning", "hydra-core", "wandb")
    lines = [
        "# Measured results",
        "",
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores ({platform.machine()}), "
        f"Python {platform.python_version()}, " + ", ".join(f"{name} {version(name)}" for name in packages) + ".",
        f"Every figure is a ratio within one round: the median of {options.rounds} rounds (smallest to largest).",
    ]
    with tempfile.TemporaryDirectory() as folder:
        if options.only in (None, "startup"):
            lines += [
                "",
                "## Start",
                "",
                "| from the command to | seconds | over importing torch and Lightning |",
                "|---|---|---|",
            ]
            for row in startup.measure(options.rounds, folder):
                lines.append(f"| {row['command']} | {row['seconds']:.2f} | {_spread(row['ratio'])} |")
        if options.only in (None, "tax"):
            lines += ["", "## Framework tax", "", "Time per optimizer step over a hand-written PyTorch loop.", ""]
            lines += ["| processes | step | by hand, ms | shardwise | stock Lightning |", "|---|---|---|---|---|"]
            for row in framework_tax.measure(options.rounds, folder):
                lines.append(
                    f"| {row['processes']} | {row['size']} | {row['hand ms']:.1f} | {_spread(row['shardwise'])} "
                    f"| {_spread(row['stock Lightning'])} |"
                )
        if options.only in (None, "tp"):
            arms = ("shardwise", "stock Lightning", "stock styles")
            lines += ["", "## Tensor parallelism", "", "Time per optimizer step over PyTorch by hand, one GPT.", ""]
            lines += [
                "| strategy | processes | step | by hand, ms | shardwise | Lightning's ModelParallelStrategy "
                "| PyTorch's stock styles |",
                "|---|---|---|---|---|---|---|",
            ]
            for row in tensor_parallel.measure(options.rounds, folder):
                ratios = " | ".join(_spread(row[arm]) if arm in row else "none" for arm in arms)
                lines.append(
                    f"| {row['layout']} | {row['processes']} | {row['size']} | {row['hand ms']:.1f} | {ratios} |"
                )
        if options.only in (None, "checkpoints"):
            lines += _checkpoints(checkpoints.measure(options.rounds, folder))
        if options.only in (None, "noise"):
            lines += _noise(noise_scale.measure(options.rounds), every=noise_scale.EVERY)
        if options.only in (None, "report"):
            lines += _report(report.measure(min(options.rounds, 3), folder))
        if options.only in (None, "sweep"):
            lines += _sweep(sweep.measure(min(options.rounds, 3), folder))
        if options.only in (None, "telemetry"):
            lines += _telemetry(telemetry.measure(min(options.rounds, 3)))
    text = "\n".join(lines) + "\n"
    print(text)
    if options.only is None:
        (HERE / "RESULTS.md").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
