"""What a shell has left behind or set that changes a training: launchers' variables, W&B, git."""

import os
import shutil
import subprocess

from shardwise.doctor.findings import Findings
from shardwise.resolve import is_launched_rank

LAUNCHERS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
SLOW = {
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for",
    "TORCH_DISTRIBUTED_DEBUG": "every collective is checked",
    "NCCL_P2P_DISABLE": "GPUs talk by way of the host",
    "NCCL_IB_DISABLE": "InfiniBand is not used",
    "NCCL_SHM_DISABLE": "shared memory is not used",
    "NCCL_DEBUG": "NCCL talks at length",
}
"""Variables that are of use while something is looked for, and cost time otherwise."""
OFF = ("", "0", "OFF", "off", "false", "WARN", "VERSION")
"""Values of those that cost nothing."""
TOLD = ("CUDA_VISIBLE_DEVICES", "HYDRA_FULL_ERROR")
GIT_SECONDS = 5


def environment(found: Findings) -> None:
    """Variables that disturb, or that one should know of."""
    before = len(found.rows)
    left = [name for name in LAUNCHERS if name in os.environ]
    if left and not is_launched_rank():
        shown = " ".join(f"{name}={os.environ[name]}" for name in left)
        text = f"{shown}, but no launcher has started this process: left over from another job"
        found.problem("environment", text, f"unset {' '.join(left)}")
    elif left:
        found.note("environment", "torchrun has started this process: what is told is of one rank")
    if "SLURM_JOB_ID" in os.environ:
        where = "a step of it" if "SLURM_STEP_ID" in os.environ else "its batch shell"
        found.note("environment", f"SLURM_JOB_ID={os.environ['SLURM_JOB_ID']}: in a job of SLURM, {where}")
    elif slurm := sorted(name for name in os.environ if name.startswith("SLURM_")):
        fix = "unset ${!SLURM_*}"
        found.note(
            "environment", f"{slurm[0]} and {len(slurm) - 1} more of SLURM without SLURM_JOB_ID: left over?", fix
        )
    _threads(found)
    for name, cost in SLOW.items():
        if os.environ.get(name, "") not in OFF:
            found.note("environment", f"{name}={os.environ[name]}: {cost}", f"unset {name}")
    for name in TOLD:
        if name in os.environ:
            found.note("environment", f"{name}={os.environ[name]}")
    if len(found.rows) == before:
        found.ok("environment", "nothing that disturbs")


def _threads(found: Findings) -> None:
    value, cores = os.environ.get("OMP_NUM_THREADS"), len(os.sched_getaffinity(0))
    if value is None:
        return
    first = value.split(",")[0].strip()
    if not first.isdigit() or int(first) < 1:
        found.problem("environment", f"OMP_NUM_THREADS={value} is no number of threads", "unset OMP_NUM_THREADS")
    elif int(first) > cores:
        found.problem(
            "environment", f"OMP_NUM_THREADS={value} on {cores} cores: threads wait for one another", "unset it"
        )
    elif int(first) < cores:
        found.note("environment", f"OMP_NUM_THREADS={value}: each process computes on so many of the {cores} cores")


def tracker(found: Findings) -> None:
    """Where W&B would write: the mode, the login and the service, asked without waiting for long."""
    from shardwise.tracking.wandb_service import is_logged_in, set_up, why_unreachable

    mode = os.environ.get("WANDB_MODE", "")
    facts = found.facts.setdefault("wandb", {"mode": mode or None, "logged_in": None, "reachable": None})
    if mode in ("disabled", "offline", "dryrun"):
        fix = "" if mode == "disabled" else "wandb sync <folder> uploads such runs later"
        found.note("W&B", f"WANDB_MODE={mode}: nothing is sent", fix)
        return
    settings = set_up()
    facts["logged_in"] = is_logged_in(settings)
    if not facts["logged_in"]:
        text = f"not logged in at {settings.base_url}: runs stay on this machine"
        if mode in ("online", "shared"):
            found.problem("W&B", f"{text}, though WANDB_MODE={mode}", "wandb login, or unset WANDB_MODE")
        else:
            found.note("W&B", text, "wandb login (or export WANDB_MODE=offline, or type logger=none)")
        return
    why = why_unreachable(settings)
    facts["reachable"] = why is None
    if why is None:
        found.ok("W&B", f"logged in at {settings.base_url}, which answers")
    else:
        text = f"logged in, but {settings.base_url} cannot be reached ({why}): runs stay on this machine"
        found.problem("W&B", text, "mend the network or set https_proxy; or export WANDB_MODE=offline, and sync later")


def git(found: Findings) -> None:
    """Whether a run can record the commit of the code that it is of."""
    if shutil.which("git") is None:
        found.note("git", "not installed: runs do not record which code they are of", "install git")
        return

    def asked(*words: str) -> str | None:
        command = ["git", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    commit = asked("rev-parse", "--short", "HEAD")
    found.facts["git"] = commit
    if commit is None:
        found.note("git", f"{os.getcwd()} is in no repository with a commit: runs do not record your code")
        return
    changed = len((asked("status", "--porcelain", "--untracked-files=no") or "").splitlines())
    found.ok("git", f"commit {commit}, {changed} changed files (runs record the difference)")
