"""`python -m shardwise eval|predict|generate`, as a user types it, of runs that were trained a moment before."""

import json
import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from checkout import ROOT
from shardwise.__main__ import main
from shardwise.checkpoint.manifest import SEAL, dump_manifest
from shardwise.checkpoint.store import checksum
from shardwise.data.digits import Digits
from shardwise.errors import ConfigError
from shardwise.generation import Texts, harmless, next_token, settled
from shardwise.predictions import named_arrays
from shardwise.use import parser_of
from warm import Warm

WORDS = "the quick brown fox jumps over lazy dogs while seven wizards box"
LAYOUTS = {
    "fsdp": ("strategy=fsdp", "trainer.devices=2"),
    "tp": ("strategy=tp", "trainer.devices=2"),
    "fsdp+tp": ("strategy=fsdp+tp", "trainer.devices=4"),
    "ddp": ("strategy=ddp", "trainer.devices=3"),
}


def environment(folder: Path) -> dict[str, str]:
    """Of a command that is typed in `folder`."""
    names = ("SLURM_", "TORCHELASTIC_", "WANDB_", "HYDRA_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    return kept | {"OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1", "PYTHONPATH": str(folder)}


def command(*words: str | os.PathLike[str], cwd: Path, timeout: float = 240.0) -> subprocess.CompletedProcess[str]:
    """Run one command of the project in `cwd`, by the interpreter of the tests."""
    typed = [sys.executable, *map(str, words)]
    return subprocess.run(typed, cwd=cwd, env=environment(cwd), capture_output=True, text=True, timeout=timeout)


def listing(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Everything below a folder: when it was changed, and what it holds."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in [folder, *folder.rglob("*")]
    }


class Trained:
    """A run, and what can be typed about it."""

    def __init__(self, warm: Warm, folder: Path, *overrides: str) -> None:
        self.warm = warm
        words = (ROOT / "train.py", *overrides, "logger=none", "precision=64-true")
        finished = warm.run(*words, cwd=folder, env=environment(folder))
        assert finished.returncode == 0, finished.stderr
        self.run = next(path.parent for path in folder.rglob("result.json"))
        self.experiment = self.run.parent
        self.metrics = json.loads((self.run / "result.json").read_text())["metrics"]

    def use(self, action: str, *words: str | os.PathLike[str], of: Path | None = None) -> tuple[dict[str, Any], str]:
        """Do something with the run; returns `result.json` and what was printed. Nothing of the run may change."""
        before, others = listing(self.run), set(self.experiment.iterdir())
        folder = self.experiment.parents[1]
        command = ("-m", "shardwise", action, of or self.run, *words)
        finished = self.warm.run(*command, cwd=folder, env=environment(folder))
        assert finished.returncode == 0, finished.stdout + finished.stderr
        assert listing(self.run) == before
        (made,) = set(self.experiment.iterdir()) - others
        assert made.name.endswith(f"-{action}")
        self.made = made
        return json.loads((made / "result.json").read_text()), finished.stdout


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Trained:
    # Two epochs, so that the last validation is of the last step.
    return Trained(warm, tmp_path_factory.mktemp("digits"), "model=mlp", "trainer.max_steps=45")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Trained:
    folder = tmp_path_factory.mktemp("text")
    draw = random.Random(0)
    (folder / "words.txt").write_text(" ".join(draw.choice(WORDS.split()) for _ in range(1000)) + "\n")
    small = ("data.context=16", "model.n_layer=2", "model.width=32", "batch.global_size=16", "optimizer.lr=0.01")
    kind = ("data=text", "task=language_model", "model=gpt", f"data.path={folder / 'words.txt'}")
    return Trained(warm, folder, *kind, *small, "trainer.max_steps=20", "trainer.limit_test_batches=1")


# ---- eval ----------------------------------------------------------------------------------------------------------


def test_eval_is_the_runs_own_test(digits: Trained, tmp_path: Path) -> None:
    target = tmp_path / "metrics.json"
    result, printed = digits.use("eval", "--to", target)
    own = {name: value for name, value in digits.metrics.items() if name.startswith("test/")}
    assert set(own) == {"test/loss", "test/accuracy"}
    assert result["metrics"] == own
    assert (result["split"], result["samples"], result["step"]) == ("test", 359, 45)
    for name, value in own.items():
        assert f"{name} " in printed
        assert repr(value) in printed
    assert json.loads(target.read_text())["metrics"] == own
    checkpoint = str(digits.run / "checkpoints" / "step_00000045")
    assert json.loads((digits.made / "provenance.json").read_text())["parent"] == checkpoint
    present = {path.name for path in digits.made.iterdir()}
    assert {"config.yaml", "overrides.yaml", "provenance.json", "ranks", "result.json"} <= present
    assert "checkpoints" not in present


@pytest.mark.parametrize("layout", ["fsdp", "tp"])
def test_eval_under_another_strategy(digits: Trained, layout: str) -> None:
    result, printed = digits.use("eval", *LAYOUTS[layout])
    assert "2 CPU processes" in printed
    for name, value in result["metrics"].items():
        assert value == pytest.approx(digits.metrics[name], rel=1e-12), name


def test_eval_of_a_copy_without_its_run_on_another_split(digits: Trained, tmp_path: Path) -> None:
    shutil.copytree(digits.run / "checkpoints", tmp_path / "copied")
    result, _ = digits.use("eval", "--split", "val", "batch.eval_size=50", of=tmp_path / "copied" / "last")
    assert result["metrics"].keys() == {"val/loss", "val/accuracy"}
    assert result["checkpoint"] == str(tmp_path / "copied" / "step_00000045")
    for name, value in result["metrics"].items():
        assert value == pytest.approx(digits.metrics[name], rel=1e-12), name


def test_eval_under_torchrun(digits: Trained) -> None:
    before = set(digits.experiment.iterdir())
    words = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
    finished = command(*words, "-m", "shardwise", "eval", digits.run, cwd=digits.experiment.parents[1])
    assert finished.returncode == 0, finished.stderr
    (made,) = set(digits.experiment.iterdir()) - before
    metrics = json.loads((made / "result.json").read_text())["metrics"]
    assert metrics == pytest.approx({name: digits.metrics[name] for name in metrics}, rel=1e-12)
    assert sorted(path.name for path in (made / "ranks").glob("*.log")) == ["rank_0.log", "rank_1.log"]


# ---- predict -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def predicted(digits: Trained) -> dict[str, NDArray[Any]]:
    result, printed = digits.use("predict")
    assert result["predictions"] == str(digits.made / "predictions.npz")
    assert "359 x 10" in printed
    return dict(np.load(result["predictions"]))


def test_predictions_are_of_every_sample_in_its_order(digits: Trained, predicted: dict[str, NDArray[Any]]) -> None:
    kinds = {name: (array.dtype.name, array.shape) for name, array in predicted.items()}
    shape = (359, 10)
    assert kinds == {"prediction": ("int64", (359,)), "probabilities": ("float32", shape), "label": ("int64", (359,))}
    data = Digits()
    data.prepare_data()
    data.setup("test")
    assert data.test_set is not None
    labels = [int(data.test_set[i][1]) for i in range(359)]
    assert predicted["label"].tolist() == labels
    np.testing.assert_array_equal(predicted["prediction"], predicted["probabilities"].argmax(axis=1))
    np.testing.assert_allclose(predicted["probabilities"].sum(axis=1), 1, rtol=1e-6)
    accuracy = (predicted["prediction"] == predicted["label"]).mean()
    assert accuracy == pytest.approx(digits.metrics["test/accuracy"], rel=1e-6)


@pytest.mark.parametrize("layout", ["ddp", "fsdp+tp"])
def test_predictions_under_another_strategy(
    digits: Trained, predicted: dict[str, NDArray[Any]], layout: str, tmp_path: Path
) -> None:
    target = tmp_path / "predictions.npz"
    target.write_text("of an earlier day")
    digits.use("predict", "--to", target, "--force", *LAYOUTS[layout])
    found = dict(np.load(target))
    assert found.keys() == predicted.keys()
    np.testing.assert_array_equal(found["label"], predicted["label"])
    np.testing.assert_array_equal(found["prediction"], predicted["prediction"])
    np.testing.assert_allclose(found["probabilities"], predicted["probabilities"], rtol=1e-6)
    assert list(tmp_path.glob(".predictions*")) == []


def test_a_language_model_is_judged_by_every_sample(text: Trained) -> None:
    measured, printed = text.use("eval")
    assert "trainer.limit_test_batches=1 of the training is left out: every sample counts" in printed
    result, _ = text.use("predict")
    found = dict(np.load(result["predictions"]))
    assert found["loss"].dtype == np.float32
    assert found["targets"].tolist() == [16] * measured["samples"]
    assert found["loss"].astype(np.float64).mean() == pytest.approx(measured["metrics"]["test/loss"], rel=1e-6)


def test_a_modules_own_predictions(warm: Warm, tmp_path: Path) -> None:
    """Whatever its predict_step returns; the package has to be allowed again."""
    (tmp_path / "own.py").write_text(
        "from shardwise.module import Classification\n"
        "class Own(Classification):\n"
        "    def predict_step(self, batch, batch_idx):\n"
        "        logits = self.model(batch[0])\n"
        "        return logits.max(dim=-1).values, batch[1]\n"
    )
    own = ("task._target_=own.Own", "plugins=[own]")
    run = Trained(warm, tmp_path, "model=mlp", "trainer.max_steps=2", *own)
    result, _ = run.use("predict", "--split", "val", "plugins=[own]")
    assert {name: len(array) for name, array in np.load(result["predictions"]).items()} == {
        "output_0": result["arrays"]["output_0"][0],
        "output_1": result["arrays"]["output_0"][0],
    }


def test_what_predict_step_may_return() -> None:
    two = torch.zeros(2, dtype=torch.bfloat16)
    assert {name: array.dtype.name for name, array in named_arrays(two).items()} == {"prediction": "float32"}
    assert list(named_arrays((two, two))) == ["output_0", "output_1"]
    assert list(named_arrays({"a": two})) == ["a"]
    for wrong in (None, {}, {"a": 1}, (two, torch.zeros(3)), torch.zeros(())):
        with pytest.raises(ConfigError, match=r"^predict_step returned [^\n]* first dim"):
            named_arrays(wrong)


# ---- generate ------------------------------------------------------------------------------------------------------

SPEECH = ("--prompt", "the quick", "--tokens", "40")


@pytest.fixture(scope="module")
def written(text: Trained) -> str:
    """Longer than what the model sees at once."""
    result, printed = text.use("generate", *SPEECH)
    (found,) = result["texts"]
    assert printed == f"{found}\n"
    assert found.startswith("the quick")
    assert len(found) == len("the quick") + 40
    return found


@pytest.mark.parametrize("layout", ["fsdp", "tp", "fsdp+tp"])
def test_the_text_is_the_same_under_another_strategy(text: Trained, written: str, layout: str) -> None:
    result, printed = text.use("generate", *SPEECH, *LAYOUTS[layout])
    assert result["texts"] == [written]
    assert printed == f"{written}\n"


def test_several_texts_and_a_file(text: Trained, written: str, tmp_path: Path) -> None:
    target = tmp_path / "texts.txt"
    result, _ = text.use("generate", *SPEECH, "--num", "2", "--to", target)
    first, second = result["texts"]
    assert first == written
    assert second != first
    assert target.read_text() == f"{first}\n\n{second}\n"


def test_what_is_drawn() -> None:
    logits_V = torch.tensor([0.0, 3.0, 1.0, 2.0], dtype=torch.float64)
    draw = torch.Generator().manual_seed(0)

    def drawn(count: int, **options: Any) -> list[int]:
        return [next_token(logits_V, generator=draw, **options) for _ in range(count)]

    assert set(drawn(20, temperature=0, top_k=None)) == {1}
    assert set(drawn(20, temperature=1e-9, top_k=None)) == {1}
    assert set(drawn(200, temperature=5.0, top_k=2)) == {1, 3}
    counts = np.bincount(drawn(4000, temperature=1.0, top_k=None), minlength=4) / 4000
    np.testing.assert_allclose(counts, logits_V.softmax(dim=0).numpy(), atol=0.03)
    with pytest.raises(ConfigError, match="not finite"):
        next_token(torch.tensor([0.0, math.nan]), temperature=1.0, top_k=None, generator=draw)


def test_texts_grow_and_each_has_numbers_of_its_own() -> None:
    def grown(num: int) -> list[list[int]]:
        texts = Texts([1, 2], num=num, context=3, temperature=1.0, top_k=None, seed=7)
        for _ in range(20):
            assert texts.window(torch.device("cpu")).shape == (num, min(3, len(texts.ids[0])))
            texts.add(texts.choose(torch.zeros(num, 50, dtype=torch.float64)))
        return texts.ids

    three = grown(3)
    assert grown(1) == three[:1]
    assert len({tuple(ids) for ids in three}) == 3


def test_what_a_terminal_is_shown() -> None:
    assert settled(b"caf\xc3".decode(errors="replace")) == "caf"
    assert harmless("a\tb\n\x1b[2J\x07") == "a\tb\n\\x1b[2J\\x07"


# ---- what is wrong -------------------------------------------------------------------------------------------------


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., str]:
    """The one line that answers a command which changes nothing."""

    def present() -> dict[str, tuple[int, bytes]]:
        # Whether a folder can be made is found out by making one.
        return {name: file for name, file in listing(tmp_path).items() if name != "."}

    def refuse(run: Trained, *words: str) -> str:
        before, here = listing(run.experiment), present()
        capsys.readouterr()
        status = main(list(words))
        out, err = capsys.readouterr()
        assert (status, out) == (2, ""), f"{words}: {out}{err}"
        assert err.startswith("error: "), err
        assert err.count("\n") == 1, err
        assert listing(run.experiment) == before
        assert present() == here
        return err.removeprefix("error: ").rstrip()

    return refuse


def test_wrong_words_about_a_classifier(digits: Trained, refused: Callable[..., str], tmp_path: Path) -> None:
    run, there = str(digits.run), tmp_path / "there.npz"
    there.write_text("precious")
    table = {
        ("eval",): "eval needs a checkpoint or a run folder first",
        ("eval", "strategy=ddp"): "eval needs a checkpoint or a run folder first, and strategy=ddp is none",
        ("eval", "nowhere"): "nowhere: no such folder",
        ("eval", str(tmp_path)): "is no checkpoint and no run folder",
        ("eval", run, "--split", "train"): "argument --split: invalid choice: 'train'",
        ("eval", run, "--spilt", "val"): "--spilt",
        ("eval", run, "trainer.max_steps=3"): "trainer.max_steps=3: eval trains nothing: leave it out",
        ("eval", run, "batch.global_size=3"): "type batch.eval_size=",
        ("eval", run, "init_from=x"): "init_from=x: eval trains nothing",
        ("eval", run, "resume=last"): "eval takes its checkpoint as the first word: leave resume= out",
        ("eval", run, "-m", "seed=1,2"): "-m: eval does one thing at a time",
        ("eval", run, "strategy=fsdpp"): "strategy=fsdpp",
        ("eval", run, "strategy=tp", "trainer.devices=1"): "strategy=tp on 1 device splits nothing",
        ("eval", run, "data.pth=x"): "data.pth: Digits has no such argument",
        ("eval", run, "model._target_=evil.Model"): "package 'evil' is not allowed here",
        ("predict", run, "--to", str(there)): f"--to {there} exists: type another name, or --force",
        ("predict", run, "--to", str(tmp_path / "no" / "x.npz")): "there is no folder",
        ("predict", run, "--to", str(tmp_path)): "is a folder: type the name of a file",
        ("predict", run, "--to", "s3://bucket/x"): "a file of this machine is needed",
        ("predict", run, "trainer.limit_predict_batches=1", *LAYOUTS["fsdp"]): "would leave gaps",
        ("generate", run): "the following arguments are required: --prompt",
        ("generate", run, "--prompt", "x"): "the task of this checkpoint is Classification",
        ("generate", run, "--prompt", "x", "--temperature", "-1"): "--temperature -1.0: a number from 0",
        ("generate", run, "--prompt", "x", "--tokens", "0"): "--tokens 0: a number from 1",
        ("generate", run, "--prompt", "x", "--top-k", "many"): "argument --top-k: invalid int value: 'many'",
    }
    for words, expected in table.items():
        assert expected in refused(digits, *words), words
    assert there.read_text() == "precious"


def test_wrong_words_about_a_language_model(text: Trained, refused: Callable[..., str]) -> None:
    run = str(text.run)
    table = {
        ("--prompt", "the €"): "--prompt: the character '€' is not among the 28 of the vocabulary: leave it out",
        ("--prompt", ""): "--prompt is empty",
        ("--prompt", "x", "data=synthetic_tokens"): "SyntheticTokens has no vocabulary that turns text into tokens",
        ("--prompt", "x", "data.path=gone.txt"): "gone.txt",
    }
    for words, expected in table.items():
        assert expected in refused(text, "generate", run, *words), words


def test_a_damaged_checkpoint_is_named(digits: Trained, refused: Callable[..., str], tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(digits.run / "checkpoints", copied)
    name = "step_00000045"
    data = copied / name / "__0_0.distcp"
    whole = data.read_bytes()
    data.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    assert f"{copied / name} is damaged or incomplete: __0_0.distcp" in refused(digits, "eval", str(copied / name))
    data.write_bytes(whole)
    (copied / name / "manifest.json").write_text(json.dumps({"format_version": 99, "files": {}}))
    assert "has format 99, this shardwise reads up to 1: install a newer" in refused(digits, "eval", str(copied / name))


def test_a_stranger_s_checkpoint_says_nothing_of_this_machine(
    digits: Trained, refused: Callable[..., str], tmp_path: Path
) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(digits.run / "checkpoints", copied)
    path = copied / "step_00000045" / "state.json"
    state, whole = json.loads(path.read_text()), json.loads((path.parent / "manifest.json").read_text())

    def says(overrides: list[str], **config: object) -> None:
        plain = {**state, "overrides": [*state["overrides"], *overrides], "config": {**state["config"], **config}}
        path.write_text(json.dumps(plain))
        entry = {"bytes": path.stat().st_size, "xxh3_128": checksum(path)}
        files = {**whole["files"], "state.json": entry}
        told = {key: value for key, value in whole.items() if key != SEAL}
        (path.parent / "manifest.json").write_bytes(dump_manifest({**told, "files": files}))

    says(["+extra.a=${oc.env:HOME}"])
    assert "extra.a is an interpolation" in refused(digits, "eval", str(path.parent))
    theirs = str(tmp_path / "theirs")
    says(["logger=wandb", "+logger.settings={base_url: x}", f"output_root={theirs}"], output_root=theirs)
    _, printed = digits.use("eval", of=path.parent)
    assert "a place elsewhere for the run folder" in " ".join(printed.split())
    assert not Path(theirs).exists()


def test_another_model_is_named_in_one_line(digits: Trained) -> None:
    words = ("-m", "shardwise", "eval", digits.run, "model.width=48")
    before = listing(digits.run)
    finished = command(*words, cwd=digits.experiment.parents[1])
    assert finished.returncode == 2, finished.stdout + finished.stderr
    assert "step_00000045 is of another model: of another shape are" in finished.stderr
    assert finished.stderr.count("\n") == 1, finished.stderr
    assert listing(digits.run) == before


@pytest.mark.parametrize("action", ["eval", "predict", "generate"])
def test_help_is_a_short_page(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([action, "--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert len(out.splitlines()) < 35
    assert f"usage: python -m shardwise {action} <checkpoint>" in out
    for option in parser_of(action)._option_string_actions:
        assert option in out
