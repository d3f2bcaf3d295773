"""Every notebook runs from top to bottom over a sweep that was just made."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from checkout import ROOT, TrainRun

SWEEP = ("-m", "model=mlp", "model.width=8", "trainer.max_epochs=1", "logger=none", "trainer.log_every_n_steps=2")
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def cells(notebook: Path) -> list[str]:
    plain = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in plain if cell["cell_type"] == "code"]


def run_notebook(notebook: Path) -> list[Any]:
    """Run all cells; returns what their last expressions show, as a notebook would show it."""
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = []
    for source in cells(notebook):
        tree = ast.parse(source, str(notebook))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, str(notebook), "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), str(notebook), "eval"), names)  # type: ignore[attr-defined]
            shown.append(value._repr_html_() if hasattr(value, "_repr_html_") else value)
    return shown


@pytest.mark.slow
def test_the_notebooks_run_over_a_fresh_sweep(
    train_py, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep: TrainRun = train_py(*SWEEP, "batch.global_size=64,256", "optimizer.lr=1e-3,1e-2")
    monkeypatch.chdir(sweep.output_root.parent)
    assert [notebook.stem for notebook in NOTEBOOKS] == ["first_look", "sweep_analysis"]
    results = [json.loads((run / "result.json").read_text()) for run in sweep.run_folders]
    newest = max(results, key=lambda result: result["run_id"])
    best = max(result["metrics"]["test/accuracy"] for result in results)

    (curves,) = [shown for shown in run_notebook(NOTEBOOKS[0]) if shown is not None]
    said = capsys.readouterr().out
    assert newest["run_id"] in said
    assert f"{'test/accuracy':<20} {newest['metrics']['test/accuracy']:.4g}" in said
    assert "they differ in batch.global_size, optimizer.lr" in said
    assert curves.count("data:image/png;base64,") == 1

    (plots,) = [shown for shown in run_notebook(NOTEBOOKS[1]) if shown is not None]
    said = capsys.readouterr().out
    assert "4 runs of outputs/sweeps/" in said
    assert f"The highest test/accuracy is {best:.4g}" in said
    assert plots.count("data:image/png;base64,") >= 4
    assert "Final test/accuracy against the learning rate" in plots


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_in_its_own_folder_without_a_sweep_and_after_a_failure(
    notebook: Path, train_py, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run: TrainRun = train_py(*SWEEP[1:])
    failed = run.run_folder.with_name("99999999-000000-failed")
    failed.mkdir()
    for name in ("config.yaml", "overrides.yaml", "provenance.json"):
        (failed / name).write_bytes((run.run_folder / name).read_bytes())
    (failed / "result.json").write_text(json.dumps({"status": "failed", "steps": 0, "metrics": {}}))
    (run.output_root.parent / "notebooks").mkdir()
    monkeypatch.chdir(run.output_root.parent / "notebooks")
    (plots,) = [shown for shown in run_notebook(notebook) if shown is not None]
    assert plots.count("data:image/png;base64,") >= 1
    said = capsys.readouterr().out
    assert "2 runs " in said
    if notebook.stem == "first_look":
        assert run.run_folder.name in said
        assert "completed after" in said


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_defines_no_logic_and_holds_no_output(notebook: Path) -> None:
    for source in cells(notebook):
        logic = (ast.FunctionDef, ast.ClassDef, ast.While)
        found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, logic)]
        assert found == []
    plain = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    assert all(not cell.get("outputs") for cell in plain)
