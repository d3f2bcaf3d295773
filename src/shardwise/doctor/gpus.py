"""NVIDIA devices, how they are linked, and whether PyTorch can use them. The driver's own program is asked first."""

import importlib.util
import os
import re
import shutil
import subprocess
from typing import Any

from shardwise.doctor.findings import Findings

SMI_SECONDS = 8
FIELDS = ("index", "name", "memory.total", "memory.used", "driver_version", "temperature.gpu")
TAKEN = 0.05
"""Share of a GPU's memory from which somebody else is said to use it."""
HOT = 85
"""Degrees Celsius from which clocks may be lowered."""


def devices(found: Findings) -> None:
    """The GPUs that the driver knows, those that PyTorch sees, and who else uses them."""
    listed = _listed(found)
    found.facts["gpus"] = listed
    try:
        import torch
    except Exception as error:
        why = " ".join(str(error).split())[:200]
        found.problem("PyTorch", f"import torch fails ({why})", "install it again: pip install --force-reinstall torch")
        return
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found.facts["torch"] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": visible,
        "capabilities": ["{}.{}".format(*torch.cuda.get_device_capability(i)) for i in range(visible)],
        "backends": _backends(),
    }
    if listed and not visible:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        if hidden is not None and not re.search(r"\d|GPU-", hidden):
            text = f"{len(listed)} hidden by CUDA_VISIBLE_DEVICES={hidden}: training uses the CPU"
            found.note("GPUs", text, "unset CUDA_VISIBLE_DEVICES")
        elif torch.version.cuda is None:
            text = f"{len(listed)} there, but this PyTorch ({torch.__version__}) is built for CPUs"
            found.problem("GPUs", text, "install PyTorch for CUDA: see https://pytorch.org/get-started/locally")
        else:
            driver = listed[0]["driver"]
            text = f"{len(listed)} there, but PyTorch for CUDA {torch.version.cuda} cannot use driver {driver}"
            found.problem("GPUs", text, "update the driver, or install PyTorch for an older CUDA")
    elif not visible:
        found.ok("GPUs", "none: training uses the CPU")
    else:
        names = sorted({torch.cuda.get_device_name(index) for index in range(visible)})
        memory = min(torch.cuda.get_device_properties(index).total_memory for index in range(visible)) / 2**30
        driver = f", driver {listed[0]['driver']}" if listed else ""
        of = f" of {len(listed)}" if len(listed) > visible else ""
        text = f"{visible}{of} x {' and '.join(names)}, {memory:.0f} GiB{driver}, CUDA {torch.version.cuda}"
        if len(names) > 1:
            found.note("GPUs", f"{text}: the slowest sets the pace", "CUDA_VISIBLE_DEVICES with the ones of a kind")
        else:
            found.ok("GPUs", text)
        if importlib.util.find_spec("pynvml") is None:
            found.note("GPUs", "their temperature and power are not logged", "pip install nvidia-ml-py")
    backends = _backends()
    shown = ", ".join(backends) or "none"
    if "gloo" not in backends or (visible and "nccl" not in backends):
        lacks = "gloo" if "gloo" not in backends else "nccl"
        fix = "install a PyTorch that has it: see https://pytorch.org/get-started/locally"
        found.problem("collectives", f"this PyTorch has {shown}, and not {lacks}", fix)
    else:
        found.ok("collectives", shown)


def _backends() -> list[str]:
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return []
    names = [name for name in ("gloo", "nccl", "mpi", "ucc") if getattr(dist, f"is_{name}_available")()]
    if "nccl" in names:
        version = torch.cuda.nccl.version() if torch.cuda.is_available() else None
        if version:
            names.append(f"NCCL {'.'.join(map(str, version))}")
    return names


def _listed(found: Findings) -> list[dict[str, Any]]:
    """What nvidia-smi knows of each GPU; rows for those that are in use or hot."""
    lines = _smi(found, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")
    listed = []
    for line in (lines or "").splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != len(FIELDS) or not parts[0].isdigit():
            continue
        total, used, celsius = (int(text) if text.isdigit() else None for text in (parts[2], parts[3], parts[5]))
        listed.append(
            {
                "index": int(parts[0]),
                "name": parts[1],
                "memory": None if total is None else total * 2**20,
                "used": None if used is None else used * 2**20,
                "driver": parts[4],
                "celsius": celsius,
            }
        )
        if total and used and used > TAKEN * total:
            text = f"GPU {parts[0]}: {used} of {total} MiB are taken already"
            found.note(
                "GPUs", text, f"see whose with nvidia-smi; CUDA_VISIBLE_DEVICES without {parts[0]} leaves it out"
            )
        if celsius and celsius >= HOT:
            found.note("GPUs", f"GPU {parts[0]} has {celsius} C: it may clock itself down", "look at fans and air flow")
    return listed


def _smi(found: Findings, *words: str) -> str | None:
    """What the driver's program prints; None where it is not there or fails, with a row for the latter."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=SMI_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        fix = "reload the driver, or restart the machine; dmesg tells why"
        found.problem("driver", f"nvidia-smi does not answer ({type(error).__name__})", fix)
        return None
    if done.returncode:
        said = " ".join((done.stdout or done.stderr).split())[:200]
        fix = "install the driver for this kernel, or start the container with --gpus all"
        found.problem("driver", f"nvidia-smi fails: {said}", fix)
        return None
    return done.stdout


def links(found: Findings) -> None:
    """How each pair of GPUs is connected, as nvidia-smi tells it: NV18 is eighteen NVLinks, SYS crosses processors."""
    kinds = parse_topology(_smi(Findings(), "topo", "-m") or "")
    found.facts["links"] = {f"{a}-{b}": kind for (a, b), kind in kinds.items()}
    if not kinds:
        return
    counts = {kind: list(kinds.values()).count(kind) for kind in sorted(set(kinds.values()))}
    shown = ", ".join(f"{kind} for {count} pair{'' if count == 1 else 's'}" for kind, count in counts.items())
    if all(kind.startswith("NV") for kind in counts):
        found.ok("links", shown)
    elif "SYS" in counts:
        fix = "with tp, let its ranks be GPUs of one processor: order them in CUDA_VISIBLE_DEVICES"
        found.note("links", f"{shown}: SYS goes from processor to processor", fix)
    else:
        found.note("links", f"{shown}: no NVLink, so that tensor parallelism is slow", "prefer strategy=ddp or fsdp")


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """(GPU, GPU) -> kind of link, out of the matrix that ``nvidia-smi topo -m`` prints."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in text.splitlines()]
    heads = next((words for words in lines if words[:1] == ["GPU0"] and "X" not in words), [])
    columns = [int(word[3:]) for word in heads if re.fullmatch(r"GPU\d+", word)]
    kinds: dict[tuple[int, int], str] = {}
    for words in lines:
        if words and "X" in words and re.fullmatch(r"GPU\d+", words[0]):
            row = int(words[0][3:])
            for column, kind in zip(columns, words[1:], strict=False):
                if row < column:
                    kinds[row, column] = kind
    return kinds
