"""Every notebook runs from top to bottom over a run that was just made."""

import json

from checkout import ROOT


def test_the_notebooks_run_over_a_fresh_run(train_py, monkeypatch, capsys) -> None:
    run = train_py("model=mlp", "model.width=8", "trainer.max_epochs=1", "logger=none")
    monkeypatch.chdir(run.output_root.parent)
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    assert notebooks
    for notebook in notebooks:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        names: dict = {"__name__": "__main__"}
        for cell in cells:
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), str(notebook), "exec"), names)
    shown = capsys.readouterr().out
    assert run.run_folder.name in shown
    assert f"{'test/accuracy':<20} {run.result['metrics']['test/accuracy']:.4g}" in shown
