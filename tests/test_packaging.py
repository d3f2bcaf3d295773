"""What gets installed: wheel, sdist and editable install carry the same configuration, and make installs once."""

import os
import shutil
import stat
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from checkout import ROOT

Make = Callable[..., tuple[int, list[str], str]]
PROBE = """
import sys
from importlib.resources import files
from pathlib import Path
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigSource
from hydra._internal.sources_registry import SourcesRegistry
Plugins.instance()
root = Path(sys.argv[1])
assert Path(str(files("shardwise.conf"))).is_relative_to(root), files("shardwise.conf")
source = SourcesRegistry.instance().resolve("pkg")(provider="test", path="pkg://shardwise.conf")
assert source.available()
print("groups", *source.list("", None))
print("strategies", *source.list("strategy", None)) if source.is_group("strategy") else None
experiments = SourcesRegistry.instance().resolve("pkg")(provider="test", path="pkg://shardwise.experiments")
assert experiments.available()
print("plugin", "hydra_plugins.shardwise_plugin" in sys.modules)
"""
STUB = """#!/bin/sh
case "$1 $2" in
  "-c import sys"*) exit "$TOO_OLD" ;;
  "-c "*) exit 0 ;;
  "--version "*) echo "Python 3.10.9" ;;
  "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip") echo "pip" >> log; exit "$PIP_STATUS" ;;
  *) echo "$1" >> log ;;
esac
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a clone has and a build reads; builds write into their source tree."""
    copy = tmp_path_factory.mktemp("checkout") / "a folder"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy / name)
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", "conf", "experiments"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path) -> Path:
    return build_wheel(checkout, into=checkout.parent / "wheel")


def build_wheel(source: Path, *, into: Path) -> Path:
    """Build with the backend installed here (setuptools, in the extra `dev`), so that no network is needed."""
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", str(into)]
    python(["-m", "pip", "--disable-pip-version-check", "wheel", *options, str(source)], cwd=source.parent)
    (built,) = into.glob("shardwise-*.whl")
    return built


def python(arguments: list[str], *, cwd: Path, path: Path | None = None) -> str:
    environment = {**os.environ, **({"PYTHONPATH": str(path)} if path else {})}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def names(archive: Path) -> set[str]:
    with zipfile.ZipFile(archive) as file:
        return {name for name in file.namelist() if ".dist-info/" not in name}


def expected_names(checkout: Path) -> set[str]:
    """Every module and YAML file of the checkout, under its name in the wheel."""
    found = set()
    for folder, prefix in [("src", ""), ("conf", "shardwise/conf/"), ("experiments", "shardwise/experiments/")]:
        for pattern in ("*.py", "*.yaml", "*.jinja", "py.typed"):
            paths = (path.relative_to(checkout / folder).as_posix() for path in (checkout / folder).rglob(pattern))
            found |= {prefix + path for path in paths}
    return found


def probe(root: Path) -> dict[str, list[str]]:
    lines = python(["-c", PROBE, str(root)], cwd=root, path=root).splitlines()
    return {words[0]: words[1:] for words in map(str.split, lines)}


def test_wheel_holds_the_code_and_every_yaml_file(checkout: Path, wheel: Path) -> None:
    assert names(wheel) == expected_names(checkout)
    assert not (ROOT / "src" / "hydra_plugins" / "__init__.py").exists(), "other plugins would be hidden"
    with zipfile.ZipFile(wheel) as file:
        assert any(name.endswith("/LICENSE") for name in file.namelist())


def test_wheel_built_from_the_sdist_is_the_same(checkout: Path, wheel: Path, tmp_path: Path) -> None:
    code = f"from setuptools.build_meta import build_sdist; build_sdist({str(tmp_path)!r})"
    python(["-c", code], cwd=checkout)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as file:
        file.extractall(tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    assert names(build_wheel(source, into=tmp_path / "wheel")) == names(wheel)


def test_installed_wheel_serves_its_configuration_to_hydra(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "site")
    seen = probe(tmp_path / "site")
    parts = {Path(name).parts[2:] for name in names(wheel) if name.startswith("shardwise/conf/")}
    assert set(seen["groups"]) == {Path(first).stem for first, *_ in parts} - {"__init__"}
    assert (seen["plugin"] == ["True"]) == ("hydra_plugins/shardwise_plugin.py" in names(wheel))


def test_editable_install_sees_a_new_yaml_file_at_once(checkout: Path, tmp_path: Path) -> None:
    code = f"from setuptools.build_meta import build_editable; build_editable({str(tmp_path)!r})"
    python(["-c", code], cwd=checkout)
    (editable,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(editable) as file:
        (entry,) = (file.read(name).decode().strip() for name in file.namelist() if name.endswith(".pth"))
    assert entry == str(checkout / "src"), "an import hook would hide new files and confuse type checkers"
    new = checkout / "conf" / "strategy" / "added_later.yaml"
    new.parent.mkdir(exist_ok=True)
    new.write_text("a: 1\n")
    try:
        assert "added_later" in probe(Path(entry))["strategies"]
    finally:
        new.unlink()


def test_ranges_refuse_the_compromised_lightning_and_the_lock_keeps_to_the_ranges() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(text) for text in project["dependencies"] + project["optional-dependencies"]["dev"]]
    by_name = {requirement.name: requirement for requirement in wanted}
    assert "lightning" not in by_name, "the other package of the same code had the same releases"
    for bad in ("2.6.2", "2.6.3"):
        assert bad not in by_name["pytorch-lightning"].specifier
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    lock = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    for name, requirement in by_name.items():
        assert lock[name] in requirement.specifier, f"constraints.txt has {name} {lock[name]}, not {requirement}"


def test_tests_run_on_the_locked_torch() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    for name in ("torch", "torchvision", "pytorch-lightning", "hydra-core"):
        assert f"{name}=={version(name).split('+')[0]}" in lines


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """The Makefile in a folder of its own, with a stand-in for Python that writes down what it is asked to do."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder / name)
    stub = folder / "stub"
    stub.write_text(STUB)
    stub.chmod(stub.stat().st_mode | stat.S_IXUSR)
    (folder / "log").touch()

    def run(target: str, *, too_old: int = 0, pip_status: int = 0) -> tuple[int, list[str], str]:
        environment = {**os.environ, "TOO_OLD": str(too_old), "PIP_STATUS": str(pip_status)}
        environment = {name: value for name, value in environment.items() if not name.startswith(("MAKE", "MFLAGS"))}
        command = ["make", target, f"PYTHON={stub}"]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
        return done.returncode, (folder / "log").read_text().split(), done.stderr

    return run


def test_make_installs_once(make: Make) -> None:
    assert make("train")[:2] == (0, ["pip", "train.py"])
    assert make("train")[:2] == (0, ["pip", "train.py", "train.py"])


def test_make_tries_again_after_a_failed_install(make: Make) -> None:
    status, log, _ = make("train", pip_status=1)
    assert (status != 0, log) == (True, ["pip"])
    assert make("train")[:2] == (0, ["pip", "pip", "train.py"])


def test_make_refuses_an_old_python_in_one_line(make: Make) -> None:
    status, log, err = make("train", too_old=1)
    said = [line for line in err.splitlines() if not line.startswith("make")]
    assert (status != 0, log) == (True, [])
    assert len(said) == 1
    assert "needs Python 3.11 or newer" in said[0]
    assert "3.10.9" in said[0]
