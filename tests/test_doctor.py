"""What is told of a machine: rows for people, facts for programs, a fix for what is wrong, never a traceback."""

import errno
import json
import os
import resource
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from shardwise.doctor import gpus, machine, network, settings, versions
from shardwise.doctor.command import as_plain, main, verdict
from shardwise.doctor.disk import disk
from shardwise.doctor.findings import Findings, Probe, Row, look
from shardwise.doctor.measure import fit, run_processes


def found_by(probe: Probe) -> Findings:
    return look({"probe": probe})


def row_of(probe: Probe, name: str, *, state: str = "problem") -> Row:
    """The one row of a name, which is in this state."""
    rows = [row for row in found_by(probe).rows if row.name == name]
    assert [row.state for row in rows] == [state], rows
    assert rows[0].fix or state != "problem"
    assert "\n" not in rows[0].text + rows[0].fix
    return rows[0]


def test_this_machine_is_told_in_rows_and_in_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    status = main(["--quick", "--json", "--to", str(tmp_path / "doctor.json")])
    out = capsys.readouterr().out
    plain = json.loads(out)
    assert json.loads((tmp_path / "doctor.json").read_text()) == plain
    assert plain["measured"] is None
    states = {row["name"]: row["state"] for row in plain["rows"]}
    for name in ("memory", "shared memory", "disk", "interfaces", "ports", "packages", "environment", "collectives"):
        assert states[name] in ("ok", "note"), name
    assert "could not be looked at" not in out
    assert plain["problems"] == list(states.values()).count("problem")
    assert status == int(plain["problems"] > 0)
    assert 0 < plain["cpu"]["usable"] <= plain["cpu"]["cores"]
    assert 0 < plain["memory"]["available"] <= plain["memory"]["total"]
    assert plain["disk"]["free"] > 0
    assert plain["wandb"]["mode"] == "offline"
    assert "gloo" in plain["torch"]["backends"]
    assert set(plain["versions"]) >= {"torch", "pytorch-lightning", "hydra-core", "wandb"}


def test_a_problem_makes_the_exit_status_and_is_told_with_its_fix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shardwise.doctor.command.gpus.devices", lambda found: None)
    monkeypatch.setattr("shardwise.doctor.command.settings.tracker", lambda found: None)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert main(["--quick"]) == 1
    out = capsys.readouterr().out
    assert "RANK=3 WORLD_SIZE=8, but no launcher has started this process" in out
    assert "fix: unset RANK WORLD_SIZE" in out
    assert out.splitlines()[-1].startswith("to fix: ")
    assert "environment" in out.splitlines()[-1]
    assert all(line == line.rstrip() for line in out.splitlines())


def test_a_mistake_on_the_command_line_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--fast"], ["--to", str(tmp_path / "nowhere" / "x.json")], ["--to", str(tmp_path)]):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1


def test_a_probe_that_fails_or_hangs_is_a_row() -> None:
    def fails(found: Findings) -> None:
        found.ok("half", "was seen")
        raise KeyError("planted\nin two lines")

    start = time.monotonic()
    found = look(
        {"fails": fails, "hangs": lambda found: time.sleep(5), "works": lambda f: f.ok("works", "")}, seconds=0.3
    )
    assert time.monotonic() - start < 3
    assert [(row.name, row.state) for row in found.rows] == [
        ("half", "ok"),
        ("fails", "note"),
        ("hangs", "problem"),
        ("works", "ok"),
    ]
    assert "KeyError" in found.rows[1].text
    assert "\n" not in found.rows[1].text


# ---- machines that lack something ----------------------------------------------------------------------------------


def test_a_small_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    size = SimpleNamespace(f_frsize=4096, f_blocks=16_384, f_bavail=16_384)  # 64 MiB, as docker gives
    monkeypatch.setattr("shardwise.doctor.machine.os.statvfs", lambda path: size)
    row = row_of(machine.shared_memory, "shared memory")
    assert "64 MiB" in row.text
    assert "--shm-size" in row.fix
    size.f_blocks = 2**22
    assert "remove old files" in row_of(machine.shared_memory, "shared memory").fix


def test_limits_of_a_container(tmp_path: Path) -> None:
    """Version 2 with a limit above the own group, and version 1."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/a/b\n")
    group = tmp_path / "sys/fs/cgroup/a"
    (group / "b").mkdir(parents=True)
    (group / "cpu.max").write_text("50000 100000\n")
    (group / "memory.max").write_text(f"{2**30}\n")
    (group / "memory.current").write_text(f"{2**29}\n")
    (group / "b/cpu.max").write_text("max 100000\n")
    (group / "b/memory.max").write_text("max\n")
    row = row_of(lambda found: machine.cpu(found, root=tmp_path), "cpu", state="note")
    assert "grants the time of 0.5" in row.text
    row = row_of(lambda found: machine.memory(found, root=tmp_path), "memory")
    assert row.text.startswith("1.0 GiB of 16.0 GiB (cgroup), 512 MiB")
    (tmp_path / "proc/self/cgroup").write_text("3:cpu,cpuacct:/\n4:memory:/\n")
    for name, text in (("cpu/cpu.cfs_quota_us", "150000"), ("cpu/cpu.cfs_period_us", "100000")):
        (tmp_path / "sys/fs/cgroup" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "sys/fs/cgroup" / name).write_text(text)
    assert machine.cpu_quota(tmp_path) == 1.5
    assert machine.memory_limit(tmp_path) is None


def test_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_NOFILE: (256, 8192), resource.RLIMIT_MEMLOCK: (resource.RLIM_INFINITY,) * 2}
    monkeypatch.setattr("shardwise.doctor.machine.resource.getrlimit", limits.__getitem__)
    assert row_of(machine.open_files, "open files").fix == "ulimit -n 4096"
    limits[resource.RLIMIT_NOFILE] = (1024, 1024)
    assert "1024" in row_of(machine.open_files, "open files", state="note").text


def test_a_host_name_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*arguments: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr("shardwise.doctor.network.socket.gethostname", lambda: "lost")
    monkeypatch.setattr("shardwise.doctor.network.socket.getaddrinfo", unknown)
    row = row_of(network.host_name, "host name")
    assert "lost does not resolve (Name or service not known)" in row.text
    assert "127.0.0.1 lost" in row.fix
    assert "GLOO_SOCKET_IFNAME=" in row.fix


def test_a_host_name_that_is_another_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    info = [(socket.AF_INET, 1, 6, "", ("192.0.2.1", 0))]  # of documentation, nobody's
    monkeypatch.setattr("shardwise.doctor.network.socket.getaddrinfo", lambda *arguments: info)
    assert "192.0.2.1 is none of this machine's addresses" in row_of(network.host_name, "host name").text
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert row_of(network.host_name, "host name", state="ok")


def test_an_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    present = next(iter(psutil.net_if_stats()))
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib7")
    row = row_of(network.interfaces, "interfaces")
    assert "NCCL_SOCKET_IFNAME=ib7" in row.text
    for value in (f"={present}", f"{present[:2]},lo", "^ib7"):  # as NCCL reads it: exactly, by prefix, all but
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", value)
        assert row_of(network.interfaces, "interfaces", state="ok")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", f"{present},lo")
    assert row_of(network.interfaces, "interfaces", state="ok")
    for value in (f"={present}", f"{present}:1", f"^{present}"):  # gloo knows whole names only
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", value)
        assert f"GLOO_SOCKET_IFNAME={value}: {value} is not here" in row_of(network.interfaces, "interfaces").text


def test_no_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **named: object) -> None:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr("shardwise.doctor.network.socket.create_connection", refuse)
    assert "Network is unreachable" in row_of(network.ports, "ports").text


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(total=2**40, free=2**20)
    monkeypatch.setattr("shardwise.doctor.disk.shutil.disk_usage", lambda path: usage)
    root = str(tmp_path / "not" / "yet")
    row = row_of(disk(root, measure=True), "disk")
    assert "1 MiB free of 1.0 TiB" in row.text
    assert "output_root=" in row.fix
    usage.free = 2**40

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("shardwise.doctor.disk.os.fsync", full)
    assert "No space left on device" in row_of(disk(root, measure=True), "disk speed").text
    assert list(tmp_path.iterdir()) == [tmp_path / ".private"] or not list(tmp_path.iterdir())
    assert "is no folder" in row_of(disk(str(Path(__file__) / "x"), measure=False), "disk").text


def test_the_speed_of_the_disk_is_measured(tmp_path: Path) -> None:
    facts = found_by(disk(str(tmp_path), measure=True)).facts["disk"]
    assert facts["write"] > 1e6
    assert 0 < facts["fsync"] < 5
    assert "write" not in found_by(disk(str(tmp_path), measure=False)).facts["disk"]


def test_versions_out_of_range_missing_and_compromised(monkeypatch: pytest.MonkeyPatch) -> None:
    present = {**versions.installed(), "pytorch-lightning": "2.6.3", "hydra-core": "1.1.0"}
    del present["wandb"]
    monkeypatch.setattr("shardwise.doctor.versions.installed", lambda: present)
    rows = {row.text.split()[0]: row for row in found_by(versions.packages).rows}
    assert "compromised" in rows["pytorch-lightning"].text
    assert "pip uninstall pytorch-lightning" in rows["pytorch-lightning"].fix
    assert "change every key" in rows["pytorch-lightning"].fix
    assert "1.1.0 is installed" in rows["hydra-core"].text
    assert rows["hydra-core"].fix.startswith("pip install 'hydra-core")
    assert "is not installed" in rows["wandb"].text
    assert {row.state for row in rows.values()} == {"problem"}
    assert len(rows) == 3


def test_variables_that_disturb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert row_of(settings.environment, "environment", state="ok")
    for name, value, state in (
        ("OMP_NUM_THREADS", "many", "problem"),
        ("OMP_NUM_THREADS", "100000", "problem"),
        ("MASTER_ADDR", "10.0.0.1", "problem"),
        ("SLURM_NTASKS", "4", "note"),
        ("SLURM_JOB_ID", "4", "note"),
        ("NCCL_P2P_DISABLE", "1", "note"),
        ("HYDRA_FULL_ERROR", "1", "note"),
        ("CUDA_VISIBLE_DEVICES", "", "note"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert f"{name}={value}" in (text := row_of(settings.environment, "environment", state=state).text) or (
                name == "SLURM_NTASKS" and name in text
            )
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    assert row_of(settings.environment, "environment", state="ok")


def test_no_login_at_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    """A note where nobody asked for it to be online, a problem where somebody did."""
    monkeypatch.delenv("WANDB_MODE")
    assert "wandb login" in row_of(settings.tracker, "W&B", state="note").fix
    monkeypatch.setenv("WANDB_MODE", "online")
    row = row_of(settings.tracker, "W&B")
    assert "not logged in" in row.text
    assert row.fix == "wandb login, or unset WANDB_MODE"


def test_a_service_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        base = f"http://127.0.0.1:{closed.getsockname()[1]}"
    asked = SimpleNamespace(base_url=base, http_proxy=None, https_proxy=None)
    monkeypatch.setattr("shardwise.tracking.wandb_service.set_up", lambda: asked)
    monkeypatch.setattr("shardwise.tracking.wandb_service.is_logged_in", lambda settings: True)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    row = row_of(settings.tracker, "W&B")
    assert f"{base} cannot be reached" in row.text
    assert "WANDB_MODE=offline" in row.fix


def test_no_secret_and_no_command_to_the_terminal_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shardwise.doctor.command.gpus.devices", lambda found: None)
    monkeypatch.setattr("shardwise.doctor.command.settings.tracker", lambda found: None)
    monkeypatch.setenv("MY_TOKEN", "correct-horse-battery")
    monkeypatch.setenv("SLURM_JOB_ID", "correct-horse-battery \x1b[2J")
    for words in ([], ["--json"]):
        main(["--quick", *words])
        out = capsys.readouterr().out
        assert "SLURM_JOB_ID=" in out
        assert "correct-horse" not in out
        assert "\x1b[2J" not in out


def test_what_a_program_gets_is_json_without_exceptions() -> None:
    found = Findings([Row("x", "problem", "text", "fix")], {"cpu": {"quota": None}})
    plain = as_plain(found)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["problems"] == 1
    assert verdict(found) == "to fix: x"
    assert verdict(Findings()) == "nothing has to be fixed"


# ---- GPUs, of a driver that is played ------------------------------------------------------------------------------

TOPOLOGY = """\
\x1b[4m\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \t{a}\t{b}\tSYS\t0-31\t0
GPU1\t{a}\t X \t{b}\tSYS\t0-31\t0
GPU2\t{b}\t{b}\t X \tPIX\t32-63\t1
NIC0\tSYS\tSYS\tPIX\t X

Legend:

  X    = Self
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Plays nvidia-smi: prints a text for a query and another for the topology."""

    def play(query: str = "", *, topology: str = "", status: int = 0) -> None:
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "query").write_text(query)
        (tmp_path / "topology").write_text(topology)
        program = tmp_path / "bin" / "nvidia-smi"
        which = 'if [ "$1" = topo ]; then cat topology; else cat query; fi'
        program.write_text(f"#!/bin/sh\ncd {tmp_path}\n{which}\nexit {status}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")

    return play


def test_gpus_that_pytorch_cannot_use(smi: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    smi("0, NVIDIA H100, 81559, 4, 470.10, 30\n1, NVIDIA H100, 81559, 70000, 470.10, 91\n")
    found = found_by(gpus.devices)
    texts = {row.text: row for row in found.rows if row.name == "GPUs"}
    assert "GPU 1: 70000 of 81559 MiB are taken already" in texts
    assert any(text.startswith("GPU 1 has 91 C") for text in texts)
    (problem,) = [row for row in texts.values() if row.state == "problem"]
    assert problem.text == "2 there, but PyTorch for CUDA 13.0 cannot use driver 470.10"
    assert "driver" in problem.fix
    assert [gpu["memory"] for gpu in found.facts["gpus"]] == [81559 * 2**20] * 2
    monkeypatch.setattr("torch.version.cuda", None)
    assert any("built for CPUs" in row.text for row in found_by(gpus.devices).rows)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not [row for row in found_by(gpus.devices).rows if row.state == "problem"]


def test_a_driver_that_fails(smi: Callable[..., None]) -> None:
    smi("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", status=9)
    row = row_of(gpus.devices, "driver")
    assert "couldn't communicate" in row.text
    assert row.fix


def test_links_between_gpus(smi: Callable[..., None]) -> None:
    smi(topology=TOPOLOGY.format(a="NV18", b="NV18"))
    found = found_by(gpus.links)
    assert found.facts["links"] == {"0-1": "NV18", "0-2": "NV18", "1-2": "NV18"}
    assert [(row.state, row.text) for row in found.rows] == [("ok", "NV18 for 3 pairs")]
    smi(topology=TOPOLOGY.format(a="NV4", b="SYS"))
    assert row_of(gpus.links, "links", state="note").text.startswith("NV4 for 1 pair, SYS for 2 pairs")
    smi(topology="nonsense")
    assert found_by(gpus.links).rows == []


# ---- the measurement -----------------------------------------------------------------------------------------------


def test_the_line_through_the_times_is_found() -> None:
    sizes = (2**10, 2**14, 2**20, 2**24)
    latency, bandwidth, error = fit([(size, 5e-6 + size / 2e10) for size in sizes])
    assert latency == pytest.approx(5e-6)
    assert bandwidth == pytest.approx(2e10)
    assert error < 1e-6
    noisy = fit([(2**10, 1e-4), (2**14, 1e-6), (2**20, 1e-5)])  # nothing that a line would go through
    assert min(noisy[:2]) > 0


@pytest.mark.slow
def test_what_is_measured_is_above_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Real processes, from the command to the JSON object that a planner reads."""
    main(["--json", "--output-root", str(tmp_path)])
    measured = json.loads(capsys.readouterr().out)["measured"]
    assert measured["processes"] >= 2
    reduce = measured["all_reduce"]
    assert min(reduce[key] for key in ("latency", "bandwidth", "bus_bandwidth")) > 0
    assert reduce["latency"] < 1
    assert [size for size, _ in reduce["points"]] == sorted({size for size, _ in reduce["points"]})
    assert min(seconds for _, seconds in reduce["points"]) > 0
    assert {"float32", "bfloat16"} <= set(measured["matmul"])
    assert min(measured["matmul"].values()) > 1e6
    assert measured["copy"] > 1e7


@pytest.mark.slow
def test_processes_that_fail_or_take_too_long_are_told_and_gone() -> None:
    before = set(psutil.Process().children(recursive=True))
    parts = run_processes(2, "nonsense", limit=60)
    assert any("nonsense" in part.get("error", "") for part in parts)
    assert run_processes(2, "gloo", limit=0.1) == [{"error": "gave nothing within 0.1 s"}] * 2
    left = set(psutil.Process().children(recursive=True)) - before
    assert not [process for process in left if "spawn_main" in " ".join(process.cmdline())]
