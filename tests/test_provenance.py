import json
import subprocess

import pytest

from shardwise.provenance import MAX_DIFF_BYTES, collect, differences, is_secret_key, without_secrets


def git(*arguments, cwd):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *identity, *arguments], cwd=cwd, check=True, capture_output=True)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A git repository with one commit, as the current folder."""
    git("init", "-q", cwd=tmp_path)
    (tmp_path / "model.py").write_text("width = 1\n")
    git("add", ".", cwd=tmp_path)
    git("commit", "-q", "-m", "first", cwd=tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def record(**changes):
    return collect(**({"command": ["train.py"], "seed": 1, "ranks": [{"rank": 0, "host": "n1"}]} | changes))


@pytest.mark.parametrize(
    "key",
    [
        "api_key",
        "logger.api_key",
        "WANDB_API_KEY",
        "HF_TOKEN",
        "token",
        "dbPassword",
        "client_secret",
        "apikey",
        "api-key",
    ],
)
def test_names_of_secrets(key):
    assert is_secret_key(key)


@pytest.mark.parametrize(
    "key",
    ["data.tokens", "tokenizer", "eos_token", "pad_token_id", "n_tokens", "monkey", "key", "PWD", "token_file", "lr"],
)
def test_names_that_are_no_secrets(key):
    assert not is_secret_key(key)


def test_secrets_leave_a_configuration_and_all_else_stays():
    config = {
        "optimizer": {"lr": 0.1, "betas": (0.9, 0.99)},
        "logger": {"api_key": "abc", "base_url": "https://me:pa@ss@wandb.example:8080/x", "token": None},
        "data": {"eos_token": "<eos>", "path": "tokens", "token": 7, "url": "https://example.org/a?x=1"},
        "secrets": {"first": ["abc", 5]},
        "hidden": {"password": 12345678, "api_key": "${oc.env:WANDB_API_KEY}"},
    }
    assert without_secrets(config) == {
        "optimizer": {"lr": 0.1, "betas": (0.9, 0.99)},
        "logger": {"api_key": "***", "base_url": "https://***@wandb.example:8080/x", "token": None},
        "data": {"eos_token": "<eos>", "path": "tokens", "token": 7, "url": "https://example.org/a?x=1"},
        "secrets": {"first": ["***", "***"]},
        "hidden": {"password": "***", "api_key": "${oc.env:WANDB_API_KEY}"},
    }
    assert config["logger"]["api_key"] == "abc"


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("+logger.settings.api_key=a,b c", "+logger.settings.api_key=***"),
        ("model.name='hf_abcdefghijklmnopqrstuvwxyz'", "model.name='***'"),
        ("--token=abc", "--token=***"),
        ("data.path=https://u:p@host/x", "data.path=https://***@host/x"),
        ("logger={_target_: a.B, api_key: abcdef, project: p}", "logger={_target_: a.B, api_key: ***, project: p}"),
        ("strategy=fsdp+tp", "strategy=fsdp+tp"),
        ("lr_scaling.base_batch_size=64", "lr_scaling.base_batch_size=64"),
        ("data.eos_token=<eos>", "data.eos_token=<eos>"),
    ],
)
def test_secrets_leave_a_command_line(argument, expected):
    assert without_secrets(["train.py", argument]) == ["train.py", expected]
    assert without_secrets(without_secrets([argument])) == [expected]


def test_the_argument_after_an_option_is_its_value():
    assert without_secrets(["run", "--api-key", "abc", "x=1"]) == ["run", "--api-key", "***", "x=1"]
    assert without_secrets("run --api-key abc x=1") == "run --api-key *** x=1"


def test_a_secret_of_the_environment_is_found_anywhere(monkeypatch):
    monkeypatch.setenv("MY_SERVICE_TOKEN", "plainlooking")
    assert without_secrets({"note": "sent with plainlooking today"}) == {"note": "sent with *** today"}


def test_code_about_tokens_survives():
    code = "def f(token: str, max_tokens=5):\n    token = next(tokens)\n    tokens_BT = tokens[0]\n"
    assert without_secrets(code) == code


def test_a_record_names_code_versions_and_machine(project, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("HF_TOKEN", "hf_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa")
    (project / "model.py").write_text('width = 2\napi_key = "0123456789"\nurl = "https://u:pass@h/"\n')
    (project / "new.py").write_text("")
    found = record(command=["train.py", "logger.api_key=0123456789"], seed=7)
    text = json.dumps(found, allow_nan=False)
    for secret in ("0123456789", "u:pass", "hf_aaaa"):
        assert secret not in text
    assert len(found["git"]["commit"]) == 40
    assert found["git"]["dirty"] is True
    assert "+width = 2" in found["git"]["diff"]
    assert found["git"]["untracked"] == ["new.py"]
    assert found["seed"] == 7
    assert found["hosts"] == ["n1"]
    assert found["command"] == ["train.py", "logger.api_key=***"]
    assert found["versions"].keys() >= {"python", "torch", "pytorch-lightning", "hydra-core", "numpy"}
    assert found["environment"].items() >= {"OMP_NUM_THREADS": "3", "NCCL_DEBUG": "INFO"}.items()
    assert "HF_TOKEN" not in found["environment"]
    assert found["cpu"]["cores"] >= 1


def test_no_repository_and_no_git_are_fine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert record()["git"] is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert record()["git"] is None


def test_a_repository_without_a_commit(tmp_path, monkeypatch):
    git("init", "-q", cwd=tmp_path)
    monkeypatch.chdir(tmp_path)
    assert record()["git"]["commit"] is None


def test_a_huge_diff_is_cut_and_still_compared(project):
    (project / "model.py").write_text("x = 1\n" * (MAX_DIFF_BYTES // 4))
    one = record()
    assert one["git"]["diff_truncated"] is True
    assert len(one["git"]["diff"]) <= MAX_DIFF_BYTES
    (project / "model.py").write_text("x = 1\n" * (MAX_DIFF_BYTES // 4) + "x = 2\n")
    assert [line.split(":")[0] for line in differences(one, record())] == ["uncommitted changes"]


def test_differences_are_one_line_each(project):
    old = record()
    assert differences(old, record(seed=2, command=["other.py"])) == []
    (project / "model.py").write_text("width = 2\n")
    git("commit", "-q", "-a", "-m", "second", cwd=project)
    (project / "model.py").write_text("width = 3\n")
    new = record()
    new["versions"] |= {"torch": "9.9", "deepspeed": "1.0"}
    del new["versions"]["numpy"]
    new["accelerators"] = ["H200", "H200"]
    new["cpu"] = {"model": "Z80", "cores": 1}
    lines = differences(old, new)
    assert lines[0] == f"git commit: {old['git']['commit']} -> {new['git']['commit']}"
    assert lines[1].startswith("uncommitted changes: none -> ")
    assert f"torch: {old['versions']['torch']} -> 9.9" in lines
    assert "deepspeed: none -> 1.0" in lines
    assert f"numpy: {old['versions']['numpy']} -> none" in lines
    assert "accelerators: none -> 2 x H200" in lines
    assert lines[-2].endswith("-> Z80 model, 1 cores")
    assert len(lines) == 7


def test_a_record_from_a_stranger_neither_crashes_nor_writes_to_the_terminal(project):
    new = record()
    hostile = {"git": 5, "versions": {"torch": "1\n\x1b[2J" + "x" * 1000}, "cpu": ["\x1b]0;"], "accelerators": None}
    lines = differences(hostile, new)
    assert all(line.isprintable() and len(line) < 300 for line in lines)
    assert any(line.startswith("torch: 1") for line in lines)
