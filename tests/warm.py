"""Starts processes of the command line in a fraction of a second: a process that has imported everything forks them.

    with Warm(mark="...") as warm:
        process = warm.start("shardwise.cli:train", [["model=mlp"]], cwd=..., out=..., err=...)
        status = process.wait(60)
        process = warm.command(["train.py", "model=mlp"], cwd=..., out=..., err=...)

What is started has a session of its own, and is what `python train.py` would be, but for the imports: signals are as
they were when the interpreter started, and the forkserver of its ranks is forked, too, with its imports done.
"""

import gc
import importlib
import json
import multiprocessing.util
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

PRELOAD = ("shardwise.run", "shardwise.cli", "shardwise.rerun", "shardwise.hydra_setup", "shardwise.launch", "hydra")
MORE = ("torch.distributed.elastic.multiprocessing", "torch.distributed.launcher.api", "torchvision.transforms.v2")
MARK = "WARM_MARK"
"""Variable in the environment of every process that comes from one :class:`Warm`."""


class Warm:
    """The tests' side: talks to the process that forks. ``mark`` is in the environment of all that comes of it."""

    def __init__(self, *, mark: str) -> None:
        environment = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1"}
        self.mark = mark
        paths = [str(Path(__file__).parent), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.pid = self._process.pid

    def __enter__(self) -> "Warm":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process that forks has died"
        return json.loads(answer)

    def start(self, target: str, arguments: list[Any], *, cwd: Path, out: Path, err: Path) -> "Started":
        """A process that calls ``module:function`` with these arguments, and ends with what it returns."""
        places = {"cwd": str(cwd), "out": str(out), "err": str(err)}
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return Started(self, self.ask(target=target, arguments=arguments, env=environment, **places))

    def command(
        self, words: Sequence[str | Path], *, cwd: Path, out: Path, err: Path, env: Mapping[str, str] | None = None
    ) -> "Started":
        """What ``python`` would do with these words: ``.../train.py ...`` or ``-m shardwise ...``.

        It has this environment and no other variable, and looks for modules where that interpreter would.
        """
        places = {"cwd": str(cwd), "out": str(out), "err": str(err)}
        environment = dict(os.environ if env is None else env)
        return Started(self, self.ask(words=[str(word) for word in words], env=environment, **places))

    def run(
        self, *words: str | os.PathLike[str], cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 240.0
    ) -> subprocess.CompletedProcess[str]:
        """:meth:`command` to its end, as ``subprocess.run`` would; ended with its session if it takes too long."""
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder) / "out", Path(folder) / "err"
            process = self.command([str(word) for word in words], cwd=cwd, out=out, err=err, env=env)
            try:
                status = process.wait(timeout)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
            return subprocess.CompletedProcess(words, status, out.read_text(), err.read_text())


class Started:
    """As much of ``subprocess.Popen`` as is needed."""

    def __init__(self, warm: Warm, pid: int) -> None:
        self._warm = warm
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._warm.ask(poll=self.pid)
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, seconds: float = 60.0) -> int:
        end = time.monotonic() + seconds
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", seconds)
            time.sleep(0.01)
        return status


# ---- the process that forks -----------------------------------------------------------------------------------------


def main() -> None:
    for module in (*PRELOAD, *MORE):
        importlib.import_module(module)
    gc.freeze()  # a collection in a child would otherwise copy what it shares
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
            continue
        if pid := os.fork():
            print(pid, flush=True)
            continue
        sys.exit(_obey(request))


def _obey(request: dict[str, Any]) -> Any:
    os.setsid()
    for path, descriptor, flags in (
        (os.devnull, 0, os.O_RDONLY),
        (request["out"], 1, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        (request["err"], 2, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    ):
        opened = os.open(path, flags)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(request["cwd"])
    multiprocessing.util.spawnv_passfds = _spawn_or_fork  # type: ignore[attr-defined]
    if "words" in request:
        return _perform(request["words"], request["env"])
    os.environ.update(request["env"])
    module, _, name = request["target"].partition(":")
    sys.argv[:] = [module, *(str(one) for one in request["arguments"][0])]
    return getattr(importlib.import_module(module), name)(*request["arguments"])


def _perform(words: list[str], environment: dict[str, str]) -> Any:
    ours = [str(Path(__file__).parent), *os.environ["PYTHONPATH"].split(os.pathsep)]
    theirs = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    os.environ.clear()
    os.environ.update(environment)
    is_module = words[0] == "-m"
    first = os.getcwd() if is_module else os.path.dirname(os.path.abspath(words[0]))
    sys.path[:] = [first, *theirs, *(path for path in sys.path if path not in ours)]
    sys.orig_argv[:] = [sys.executable, *words]
    if is_module:
        assert words[1] == "shardwise"
        from shardwise.__main__ import main as run

        sys.argv[:] = [str(Path(sys.modules["shardwise"].__file__ or "").with_name("__main__.py")), *words[2:]]
    else:
        assert Path(words[0]).name == "train.py"
        from shardwise.cli import train as run

        sys.argv[:] = words
    return run()


_spawn = multiprocessing.util.spawnv_passfds  # type: ignore[attr-defined]


def _spawn_or_fork(path: bytes, arguments: list[str], descriptors: list[int]) -> int:
    """The forkserver without another interpreter: this one has all that it would import."""
    command = arguments[-1]
    if "multiprocessing.forkserver" not in str(command):
        return _spawn(path, arguments, descriptors)
    if pid := os.fork():
        return pid
    try:
        signal.set_wakeup_fd(-1)
        for one in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if callable(signal.getsignal(one)):
                signal.signal(one, signal.default_int_handler if one == signal.SIGINT else signal.SIG_DFL)
        kept = sorted({0, 1, 2, *descriptors})
        for first, last in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
            os.closerange(first + 1, last)
        multiprocessing.util._afterfork_registry.clear()  # type: ignore[attr-defined]
        forkserver._forkserver._lock = threading.Lock()  # type: ignore[attr-defined]
        exec(command)
    finally:
        os._exit(1)


if __name__ == "__main__":
    main()
