"""``python -m shardwise <command>``."""

import sys
from collections.abc import Callable, Sequence

from shardwise.config import nearest


def _train(argv: Sequence[str]) -> int:
    from shardwise.cli import train

    return train(argv)


def _tokenize(argv: Sequence[str]) -> int:
    from shardwise.data.tokenize import main

    return main(list(argv))


def _inspect(argv: Sequence[str]) -> int:
    from shardwise.checkpoint.inspect import main

    return main(list(argv))


def _export(argv: Sequence[str]) -> int:
    from shardwise.weights.export import main

    return main(list(argv))


def _show(argv: Sequence[str]) -> int:
    from shardwise.show.command import main

    return main(list(argv))


def _report(argv: Sequence[str]) -> int:
    from shardwise.report.command import main

    return main(list(argv))


def _logs(argv: Sequence[str]) -> int:
    from shardwise.logs import main

    return main(list(argv))


def _doctor(argv: Sequence[str]) -> int:
    from shardwise.doctor.command import main

    return main(list(argv))


def _use(action: str) -> Callable[[Sequence[str]], int]:
    def command(argv: Sequence[str]) -> int:
        from shardwise.use import main

        return main(action, argv)

    return command


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "train": (_train, "compose a configuration and train (the same as python train.py)"),
    "tokenize": (_tokenize, "turn text into shards of token ids for data=tokens"),
    "export": (_export, "write the weights of a checkpoint as safetensors, plain or in Llama's layout"),
    "eval": (_use("eval"), "metrics of a checkpoint, on any data and under any strategy"),
    "predict": (_use("predict"), "predictions of a checkpoint for every sample, into a file"),
    "generate": (_use("generate"), "text from a checkpoint of a language model"),
    "show": (_show, "make a page of one run: curves, the times of every rank, its mesh and configuration"),
    "report": (_report, "make a page of plots and tables out of a folder of runs, such as a sweep's"),
    "logs": (_logs, "what the ranks of a run have printed, merged by time"),
    "doctor": (_doctor, "what this machine has for training, how fast it is, and what to fix"),
    "inspect": (_inspect, "print what is in a checkpoint, and whether it is whole"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` names; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: python -m shardwise <command> ...\n")
        for name, (_, text) in COMMANDS.items():
            print(f"  {name:<10} {text}")
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        names = ", ".join(COMMANDS)
        print(f"error: {argv[0]}: no such command{nearest(argv[0], COMMANDS)} (commands: {names})", file=sys.stderr)
        return 2
    return COMMANDS[argv[0]][0](argv[1:])


if __name__ == "__main__":
    sys.exit(main())
