"""``python -m shardwise eval|predict|generate <checkpoint> ...``: from the words on the command line to a job.

The configuration is that of the checkpoint, followed by what is typed. What only training needs is left out, and so is
how the training was laid out over devices: without a word about that, one device does it. What is written goes into a
run folder of its own.
"""

import argparse
import math
import os
import secrets
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NoReturn

from shardwise.cli import USER_ERROR, check_plugged_in, experiment_of, status_of
from shardwise.config import BatchConfig, CheckpointConfig, Config, LRScalingConfig, ScheduleConfig, TrainerConfig
from shardwise.errors import ConfigError
from shardwise.groups import GROUPS, WORDS
from shardwise.job import Job, check_writable, in_run_folder, make_job
from shardwise.rerun import Repeated, admitted, key_of
from shardwise.resolve import Resolved, check_steps, find_dims, find_world, is_launched_rank, resolve_in

LAYOUT = ("strategy", "nodes", "trainer.devices", "trainer.num_nodes", "launch")
"""How the work is laid out over devices: typed now, or one device."""
TRAINER = ("accelerator", "devices", "num_nodes", "limit_val_batches", "limit_test_batches", "limit_predict_batches")
"""Keys of the trainer that mean something here, if they are typed."""
NUMERICS = ("deterministic", "benchmark")
"""Keys of the trainer that say how numbers are computed: those of the training hold."""
TRAINING = ("optimizer", "schedule", "lr_scaling", "checkpoint", "init_from")
"""Groups and keys that only training has."""

DESCRIPTIONS = {
    "eval": "Metrics of a checkpoint over every sample of a split, the same under every strategy.",
    "predict": "Predictions of a checkpoint for every sample of a split, in the data set's order, as an .npz file.",
    "generate": "Text from a checkpoint of a language model.",
}
EXAMPLES = {
    "eval": ("outputs/digits/<run id>", "outputs/digits/<run id>/checkpoints/best --split val strategy=fsdp+tp"),
    "predict": ("outputs/digits/<run id> --to predictions.npz", "s3://bucket/<run id>/last trainer.devices=2"),
    "generate": (
        "outputs/text/<run id> --prompt 'def ' --tokens 400",
        "outputs/text/<run id> --prompt 'def ' --temperature 0 strategy=tp trainer.devices=2",
    ),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} ({self.prog} --help)")


def parser_of(action: str) -> argparse.ArgumentParser:
    """The options of an action; everything else on its command line is a checkpoint and overrides."""
    prog = f"python -m shardwise {action}"
    examples = "\n".join(f"  {prog} {example}" for example in EXAMPLES[action])
    parser = _Parser(
        prog=prog,
        usage=f"{prog} <checkpoint> [options] [key=value ...]",
        description=DESCRIPTIONS[action],
        epilog=textwrap.dedent(
            """\
            <checkpoint>: its folder or URL, .../checkpoints/last or best, or a run folder (its newest whole one)
            key=value: as for train.py, after what was typed for the training: strategy=fsdp trainer.devices=2,
              data.path=..., batch.eval_size=..., plugins=[...]; one device unless something is typed about it

            examples
            """
        )
        + examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    if action == "eval":
        parser.add_argument("--split", choices=("val", "test"), help="samples to use (default: test if there are any)")
    elif action == "predict":
        words = ("test", "val", "predict")
        parser.add_argument("--split", choices=words, help="samples to use (default: test if there are any)")
    else:
        parser.add_argument("--prompt", required=True, help="how the text begins")
        parser.add_argument("--tokens", type=int, default=200, help="tokens to add (default 200)")
        parser.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest token (default 0.8)")
        parser.add_argument("--top-k", type=int, default=50, help="draw among so many; 0: among all (default 50)")
        parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default 0)")
        parser.add_argument("--num", type=int, default=1, help="texts (default 1)")
    written = {"eval": "the metrics as JSON", "predict": "the predictions", "generate": "the text"}[action]
    where = "in the run folder" if action == "predict" else "not written"
    parser.add_argument("--to", metavar="FILE", help=f"file for {written} (default: {where})")
    parser.add_argument("--force", action="store_true", help="replace the file of --to if it exists")
    return parser


def main(action: str, argv: Sequence[str] | None = None) -> int:
    """Evaluate, predict or generate as ``argv`` says (the command line by default); returns the exit status.

    A launched rank other than the first composes nothing: it waits for the job and obeys.
    """
    argv = list(sys.argv[2:] if argv is None else argv)
    if any(flag in argv for flag in ("--help", "-h")):
        print(parser_of(action).format_help().rstrip())
        return 0
    launched = is_launched_rank()
    if launched:
        from shardwise.signals import die_with_parent

        die_with_parent()
        if os.environ["RANK"] != "0":
            from shardwise.launch import hear_from_rank_zero

            return status_of(hear_from_rank_zero, rank_zero=False)
    return status_of(lambda: _start(action, argv, launched=launched))


def _start(action: str, argv: list[str], *, launched: bool) -> int:
    """Find out what is meant, check it, and do it, as the only process or as the first of ranks that exist."""
    from shardwise.hydra_setup import run_hydra
    from shardwise.launch import launch, tell_ranks

    told = not launched

    def run(config: Config, overrides: list[str], choices: dict[str, Any]) -> None:
        nonlocal told
        job = use.job(config, overrides, choices)
        with in_run_folder(job) as job:
            if not told:
                told = True
                tell_ranks(job)
            launch(job)

    try:
        use = Use.from_argv(action, argv)
        run_hydra(run, use.repeated.argv)
    except Exception:
        if not told:
            tell_ranks(None, USER_ERROR)
        raise
    if not told:  # --cfg and --info run nothing
        tell_ranks(None)
    return 0


@dataclass(frozen=True)
class Use:
    """What a command line asks of a checkpoint."""

    action: str
    options: dict[str, Any]
    typed: list[str]
    """Overrides and Hydra's flags."""
    repeated: Repeated
    """The configuration of the checkpoint, followed by what is typed."""
    then: dict[str, Any]
    """The configuration of the training."""
    mesh: dict[str, int]
    """Of the training."""
    experiment: str | None
    """Of the training."""

    @classmethod
    def from_argv(cls, action: str, argv: list[str]) -> "Use":
        """Read a command line and find the checkpoint; changes nothing.

        Raises:
            ConfigError: an option is wrong, or the checkpoint is none, damaged, or of a newer format.
        """
        from shardwise.checkpoint.find import find_checkpoint
        from shardwise.checkpoint.manifest import printable, step_of
        from shardwise.checkpoint.reader import STATE, read_state

        parsed, rest = parser_of(action).parse_known_args(argv)
        options = vars(parsed)
        if not rest or rest[0].startswith("-") or ("=" in rest[0] and not os.path.exists(rest[0])):
            given = f", and {rest[0]} is none" if rest else ""
            raise ConfigError(
                f"{action} needs a checkpoint or a run folder first{given}: python -m shardwise {action} "
                f"outputs/<experiment>/<run id>"
            )
        text, typed = rest[0], rest[1:]
        _check_typed(action, typed)
        _check_options(options)
        found = find_checkpoint(text if "://" in text else os.path.expanduser(text))
        state = read_state(found.url, configured=True)
        manifest = found.store.manifest(found.name)
        run_id, versions = printable(manifest.get("run_id")), manifest.get("versions", {})
        replaced = [key_of(line) for line in typed if key_of(line) in GROUPS]
        left_out = (*LAYOUT, *TRAINING, *replaced, "trainer", "logger")
        stored = state.get("overrides")
        if isinstance(stored, list):
            stored = [line for line in stored if not isinstance(line, str) or _kept(key_of(line), left_out)]
        repeated = Repeated(
            word=text,
            typed=typed,
            stored=admitted(stored, typed, source=f"{printable(found.url)}/{STATE}", roaming=False),
            config=_without(state["config"], left_out),
            record={"versions": versions},
            checkpoint=found.url,
            notes=[f"step {step_of(found.name)} of the run {run_id}", *found.notes()],
        )
        experiment = str(state.get("experiment") or "..")
        named = experiment != ".." and Path(experiment).name == experiment == printable(experiment)
        return cls(
            action=action,
            options={**options, "step": step_of(found.name)},
            typed=typed,
            repeated=repeated,
            then=state["config"],
            mesh=manifest.get("mesh", {}),
            experiment=experiment if named else None,
        )

    def job(self, config: Config, overrides: list[str], choices: dict[str, Any]) -> Job:
        """Everything that can be wrong is found here, before anything is made.

        Raises:
            ConfigError: the first thing that is wrong.
        """
        config, notes = self.repeated.keep(config)
        resolved, more = self._settle(config)
        config = resolved.config
        limit = config.trainer.limit_predict_batches
        if self.action == "predict" and limit is not None and resolved.dims.dp_size > 1:
            raise ConfigError(
                f"trainer.limit_predict_batches={limit} on {resolved.dims.dp_size} data-parallel ranks "
                f"would leave gaps in the order of the samples: type it on one device, or leave it out"
            )
        check_writable(config.output_root)
        check_plugged_in(resolved, trains=False)
        from shardwise.actions import check_action

        options = check_action(self.action, config, self.options)
        experiment = self.experiment if not _typed("experiment_name", self.typed) else None
        job = make_job(
            config,
            resolved.world,
            experiment=experiment or experiment_of(config, choices),
            overrides=overrides,
            command=["python", *sys.orig_argv[1:]],
            notes=[*notes, *more, *self._differences()],
            run_id=f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}-{self.action}",
        )
        return replace(self.repeated.applied(job), action=self.action, options=options)

    def _differences(self) -> list[str]:
        return [line for line in self.repeated.differences() if line.startswith("differs")]

    def _settle(self, config: Config) -> tuple[Resolved, list[str]]:
        """The configuration without what only training needs, and lines on what differs from that for a reason."""
        notes: list[str] = []
        now, plain = config.trainer, TrainerConfig()
        names = [name for name in TRAINER if _typed(f"trainer.{name}", self.typed)]
        trainer = replace(plain, max_steps=1, **{name: getattr(now, name) for name in (*names, *NUMERICS)})
        if now.accelerator == "cpu":  # any machine has one
            trainer = replace(trainer, accelerator="cpu")
        strategy, launch = config.strategy, config.launch
        if any(_typed(key, self.typed) for key in LAYOUT):
            trainer = replace(trainer, devices=now.devices, num_nodes=now.num_nodes)
        else:
            strategy = replace(Config().strategy, plan=strategy.plan, dp_replicate=-1)
            if not is_launched_rank():
                trainer = replace(trainer, devices=1)
            then = ", ".join(f"{axis}={degree}" for axis, degree in self.mesh.items() if degree > 1)
            if then:
                where = "data parallelism over the ranks of torchrun" if is_launched_rank() else "one device"
                notes.append(f"{where}, and not {then} as in training: type strategy= and trainer.devices= for another")
        if self.action == "generate":  # any length has to do, and there is nothing to save memory for
            strategy = replace(strategy, sequence_parallel=False)
        for name in TRAINER:
            limit = self.then.get("trainer", {}).get(name)
            all_of_them = limit is None or (isinstance(limit, float) and limit == 1.0)
            if name.startswith("limit") and not all_of_them and name not in names:
                notes.append(f"trainer.{name}={limit} of the training is left out: every sample counts")
        config = replace(
            config,
            trainer=trainer,
            strategy=strategy,
            launch=replace(launch, max_restarts=0, time_limit=None),
            schedule=ScheduleConfig(kind="constant"),
            lr_scaling=LRScalingConfig(),
            checkpoint=CheckpointConfig(),
            init_from=None,
            callbacks={} if self.action == "generate" else config.callbacks,
            logger=config.logger if _typed("logger", self.typed) else {"_target_": None},
        )
        check_steps(config)
        world = find_world(config)
        dims = find_dims(config, world)
        found = self.then.get("batch", {}).get("micro_size")  # where auto was typed
        size = _eval_size(config.batch, self.mesh, found=found)
        batch = BatchConfig(global_size=size * dims.dp_size, micro_size=size, eval_size=size)
        return resolve_in(replace(config, batch=batch), world), notes


def _eval_size(batch: BatchConfig, mesh: dict[str, int], *, found: Any) -> int:
    """Samples of an evaluation batch on one rank: what is typed, or what the training evaluated with."""
    micro_size = found if batch.micro_size == "auto" else batch.micro_size
    ranks = mesh.get("dp_replicate", 1) * mesh.get("dp_shard", 1) * (batch.accumulate or 1)
    size = batch.eval_size or (micro_size if isinstance(micro_size, int) else None)
    return size or max(1, batch.global_size // max(1, ranks))


# ---- words ---------------------------------------------------------------------------------------------------------


def _check_typed(action: str, typed: list[str]) -> None:
    """Refuse words that mean nothing without training."""
    for line in typed:
        key = key_of(line)
        if line in ("-m", "--multirun"):
            raise ConfigError(f"{line}: {action} does one thing at a time; type it once for each")
        if "=" not in line and not line.startswith(("-", "~")):
            continue  # a flag's value, or something that Hydra has a word for
        if key in WORDS:
            raise ConfigError(f"{line}: {action} takes its checkpoint as the first word: leave {key}= out")
        parent, _, name = key.partition(".")
        sizes = parent == "batch" and name in ("global_size", "micro_size", "accumulate")
        trainer = parent == "trainer" and name in {f.name for f in fields(TrainerConfig)} - {*TRAINER, *NUMERICS}
        if parent in (*TRAINING, "sweep") or sizes or trainer:
            instead = "; type batch.eval_size=<samples a rank takes at a time>" if sizes else ""
            raise ConfigError(f"{line}: {action} trains nothing: leave it out{instead}")


def _check_options(options: dict[str, Any]) -> None:
    """Limits of numbers, and whether the target may be written; changes nothing but the words for none."""
    for name, least in (("tokens", 1), ("num", 1), ("top_k", 0), ("seed", 0), ("temperature", 0)):
        value = options.get(name)
        if value is not None and not (least <= value < math.inf):
            raise ConfigError(f"--{name.replace('_', '-')} {value}: a number from {least} is needed")
    if "top_k" in options:
        options["top_k"] = options["top_k"] or None
    try:
        options.get("prompt", "").encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError("--prompt is not UTF-8 text: type it in a terminal that is set to UTF-8") from error
    if options["to"] is None:
        return
    target = Path(options["to"]).expanduser().absolute()
    if "://" in options["to"]:
        raise ConfigError(f"--to {options['to']}: a file of this machine is needed")
    if target.is_dir() or not target.name:
        raise ConfigError(f"--to {options['to']} is a folder: type the name of a file")
    if target.exists() and not options["force"]:
        raise ConfigError(f"--to {options['to']} exists: type another name, or --force to replace it")
    if not target.parent.is_dir():
        raise ConfigError(f"--to {options['to']}: there is no folder {target.parent}: make it, or type another")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"--to {options['to']}: {target.parent} cannot be written to: type another folder")
    options["to"] = str(target)


def _typed(key: str, typed: Sequence[str]) -> bool:
    """Whether a key, one below it, or the group that it is in is typed."""
    keys = [key_of(line) for line in typed if "=" in line]
    return any(f"{one}.".startswith(f"{key}.") or f"{key}.".startswith(f"{one}.") for one in keys)


def _kept(key: str, left_out: Sequence[str]) -> bool:
    """Whether a key of the training's counts here: a plan belongs to the model, and numerics to the numbers."""
    if key in ("strategy.plan", *(f"trainer.{name}" for name in (*NUMERICS, "accelerator"))):
        return True
    return not any(f"{key}.".startswith(f"{one}.") for one in left_out)


def _without(config: dict[str, Any], left_out: Sequence[str]) -> dict[str, Any]:
    """A plain configuration without the keys that are left out."""
    kept: dict[str, Any] = {}
    for group, value in config.items():
        if isinstance(value, dict) and group not in ("derived", "plugins"):
            value = {name: inner for name, inner in value.items() if _kept(f"{group}.{name}", left_out)}
            if value:
                kept[group] = value
        elif _kept(group, left_out):
            kept[group] = value
    return kept
