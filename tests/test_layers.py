"""An import points only downwards, and what is heavy or foreign stands in few places. Read off the source."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "shardwise"

LAYERS = (
    {"errors", "seeds", "config", "groups", "help", "explain", "hydra_setup", "search_space"}
    | {"metrics_file", "quantities"},
    {"parallel", "lr_scaling", "schedules", "resolve", "steps", "step_clock"},
    {"models", "data", "optim", "slots"},
    {"checkpoint", "weights", "strategies", "module", "tracking", "provenance", "progress"}
    | {"telemetry"}
    | {"generation", "predictions", "noise_scale"},
    {
        "job",
        "signals",
        "rerun",
        "build",
        "trainer",
        "resuming",
        "run_folder",
        "run",
        "worker",
        "launch",
        "sweep",
        "template",
        "summary",
        "cli",
        "__main__",
    }
    | {"actions", "use", "report", "show", "batch_finder", "probe"}
    | {"rank_log", "logs", "doctor"},
)
"""Modules and folders of modules, from the lowest layer up."""
LAYER = {part: number for number, parts in enumerate(LAYERS) for part in parts}

LIGHTNING = ("pytorch_lightning", "lightning_fabric", "lightning")


@cache
def modules() -> dict[str, Path]:
    """Dotted name below the package -> file; `parallel.dims`, and `parallel` for the folder itself."""
    files = [p for p in SOURCE.rglob("*.py") if p.relative_to(SOURCE).parts[0] not in ("conf", "experiments")]
    parts = {path: path.relative_to(SOURCE).with_suffix("").parts for path in files}
    names = {".".join(part for part in parts[path] if part != "__init__"): path for path in files}
    return {name: path for name, path in names.items() if name}


def imports(path: Path) -> Iterator[str]:
    """Every dotted name that a file imports, also inside its functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(name: str) -> set[str]:
    """The modules of the package that the module `name` imports."""
    found = set()
    for dotted in imports(modules()[name]):
        parts = dotted.split(".")
        if parts[0] == "shardwise":
            tail = ".".join(parts[1:])
            found.add(tail if tail in modules() else tail.rpartition(".")[0])
    return {other for other in found if other} - {name}


def users(*packages: str) -> set[str]:
    """The parts of the package (module or folder) that import one of these packages, and the plugin for Hydra."""
    files = {name.partition(".")[0]: set[Path]() for name in modules()}
    for name, path in modules().items():
        files[name.partition(".")[0]].add(path)
    files["hydra_plugins"] = set((SOURCE.parent / "hydra_plugins").glob("*.py"))
    wanted = {part: {dotted.partition(".")[0] for p in paths for dotted in imports(p)} for part, paths in files.items()}
    return {part for part, names in wanted.items() if names & set(packages)}


def test_every_module_has_a_layer_and_every_entry_a_module() -> None:
    assert {name.partition(".")[0] for name in modules()} == set(LAYER)


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_point_downwards(name: str) -> None:
    part = name.partition(".")[0]
    for other in own_imports(name):
        assert LAYER[other.partition(".")[0]] <= LAYER[part], f"{name} imports {other}, which lies above it"


def test_there_is_no_circle() -> None:
    order = list(TopologicalSorter({name: own_imports(name) for name in modules()}).static_order())
    assert order.index("errors") < order.index("cli")


def test_foreign_packages_stand_in_few_places() -> None:
    assert users("wandb") == {"tracking"}
    assert users("hydra") == {"hydra_setup", "explain", "hydra_plugins"}
    assert users("omegaconf") <= {"hydra_setup", "explain", "hydra_plugins", "tracking"}
    lowest = {part for part in users(*LIGHTNING) if LAYER[part] < 3}
    assert lowest == {"data"}, "data modules are Lightning's; everything else of Lightning stands from layer 3 up"


def test_the_lowest_layer_and_the_rules_need_no_torch() -> None:
    names = (*LAYERS[0], "lr_scaling", "schedules", "resolve", "steps", "slots", "job", "cli")
    code = f"import sys, {', '.join(f'shardwise.{name}' for name in names)}; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == "False\n"
