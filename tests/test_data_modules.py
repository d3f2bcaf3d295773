"""The shipped data modules, on real data or on tiny files in the very formats, and what they say about bad input."""

import gzip
import hashlib
import http.server
import importlib
import inspect
import itertools
import json
import pickle
import re
import struct
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch.utils.data import DataLoader

from shardwise.data import digits as digits_module
from shardwise.data.digits import Digits
from shardwise.data.stream import shard_eval_loader, shard_train_loader
from shardwise.data.synthetic import SyntheticImages, SyntheticTokens
from shardwise.data.text import Text
from shardwise.data.token_shards import HEADER, MAGIC, TokenShard, read_header, write_shard
from shardwise.data.tokenize import main, tokenize
from shardwise.data.tokens import Tokens
from shardwise.data.vision import CIFAR10, CIFAR100, MNIST, FashionMNIST, ImageFolder
from shardwise.data.vocabulary import JSONTokenizer
from shardwise.errors import ConfigError

CONF = Path(__file__).parent.parent / "conf" / "data"


def ready(module):
    module.prepare_data()
    module.setup("fit")
    return module


def train_batches(module, size=4, **kwargs):
    loader = shard_train_loader(
        module.train_dataloader(), **({"seed": 0, "global_size": size, "dp_rank": 0, "dp_size": 1} | kwargs)
    )
    return list(loader)


def eval_batches(loader, size=4):
    return list(shard_eval_loader(loader, batch_size=size, dp_rank=0, dp_size=1))


def write_mnist(root, name, *, train=20, test=10):
    raw = root / name / "raw"
    raw.mkdir(parents=True)
    for prefix, count in (("train", train), ("t10k", test)):
        images = np.arange(count, dtype=np.uint8)[:, None, None].repeat(28, 1).repeat(28, 2)
        labels = np.arange(count, dtype=np.uint8) % 2
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 0x803, count, 28, 28) + images.tobytes())
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, count) + labels.tobytes())


def write_cifar(root, monkeypatch, *, hundred=False):
    """CIFAR's pickles with a few random images; torchvision compares checksums, unless its list has None."""
    from torchvision import datasets

    kind = datasets.CIFAR100 if hundred else datasets.CIFAR10
    files = ["train"] if hundred else [f"data_batch_{i}" for i in range(1, 6)]
    test_file = "test" if hundred else "test_batch"
    folder = root / kind.base_folder
    folder.mkdir(parents=True)
    rng = np.random.RandomState(0)
    for file in [*files, test_file]:
        labels = [i % 2 for i in range(8)]
        data = rng.randint(0, 256, (8, 3072)).astype(np.uint8)
        entry = {"data": data, "fine_labels" if hundred else "labels": labels}
        (folder / file).write_bytes(pickle.dumps(entry))
    (folder / kind.meta["filename"]).write_bytes(pickle.dumps({kind.meta["key"]: ["a", "b"]}))
    monkeypatch.setattr(kind, "train_list", [[file, None] for file in files])
    monkeypatch.setattr(kind, "test_list", [[test_file, None]])
    monkeypatch.setattr(kind, "meta", kind.meta | {"md5": None})


def write_images(root, parts, *, classes=("cat", "dog"), count=4):
    for part, name, i in itertools.product(parts, classes, range(count)):
        folder = root / part / name
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((20, 24, 3), 40 * i, np.uint8)).save(folder / f"{i}.png")


# digits


def test_digits_are_all_there_split_by_class_and_the_same_every_time():
    data = ready(Digits())
    train, test = data.train_set, data.test_set
    assert len(train) + len(test) == 1797
    assert data.val_set is test or torch.equal(data.val_set.tensors[0], test.tensors[0])
    images, labels = train.tensors
    assert images.shape[1:] == (1, 8, 8)
    assert images.dtype == torch.float32
    assert (images.min().item(), images.max().item(), labels.dtype) == (0.0, 1.0, torch.int64)
    counts = [torch.bincount(part.tensors[1], minlength=10) for part in (train, test)]
    assert ((counts[1] / (counts[0] + counts[1]) - 0.2).abs() < 0.005).all()
    assert torch.equal(ready(Digits()).train_set.tensors[0], images)
    from sklearn.datasets import load_digits

    original = {(row.tobytes(), label) for row, label in zip(*load_digits(return_X_y=True), strict=True)}
    ours = {
        ((image * 16).double().flatten().numpy().tobytes(), int(label))
        for part in (train, test)
        for image, label in zip(*part.tensors, strict=True)
    }
    assert ours == original


def test_digits_can_keep_the_test_set_out_of_validation():
    plain, held_out = ready(Digits()), ready(Digits(val_fraction=0.25))
    assert torch.equal(plain.test_set.tensors[0], held_out.test_set.tensors[0])
    assert len(held_out.train_set) + len(held_out.val_set) == len(plain.train_set)
    assert len(held_out.val_set) == pytest.approx(0.25 * len(plain.train_set), abs=5)


def test_digits_load_without_importing_scikit_learn():
    code = (
        "import sys; from shardwise.data.digits import Digits; d = Digits(); d.setup('fit');"
        "print('sklearn' in sys.modules, len(d.train_set))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.split() == ["False", "1438"]


def test_missing_digits_say_what_to_install(monkeypatch, tmp_path):
    spec = type("Spec", (), {"origin": str(tmp_path / "__init__.py")})
    monkeypatch.setattr(digits_module, "find_spec", lambda name: spec)
    with pytest.raises(ConfigError, match=r"digits\.csv\.gz, which is missing.*scikit-learn"):
        Digits()
    monkeypatch.setattr(digits_module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install scikit-learn"):
        Digits()


# images


@pytest.mark.parametrize("kind", [MNIST, FashionMNIST])
def test_mnist_files(tmp_path, kind):
    write_mnist(tmp_path, kind.__name__)
    data = ready(kind(path=str(tmp_path), val_fraction=0.2))  # download=True finds the files and fetches nothing
    assert [len(part) for part in (data.train_set, data.val_set, data.test_set)] == [16, 4, 10]
    images, labels = train_batches(data)[0]
    assert (images.shape, images.dtype, labels.dtype) == ((4, 1, 28, 28), torch.float32, torch.int64)
    # image i has the grey value i and the label i % 2
    values = ((images[:, 0, 0, 0] * kind.std[0] + kind.mean[0]) * 255).round().long()
    assert torch.equal(values % 2, labels)
    assert torch.equal(torch.cat([y for _, y in eval_batches(data.test_dataloader())]), torch.arange(10) % 2)


@pytest.mark.parametrize("hundred", [False, True])
def test_cifar_files_and_augmentation(tmp_path, monkeypatch, hundred):
    write_cifar(tmp_path, monkeypatch, hundred=hundred)
    kind = CIFAR100 if hundred else CIFAR10
    data = ready(kind(path=str(tmp_path), download=False, val_fraction=0.25, num_workers=0))
    assert data.num_classes == (100 if hundred else 10)
    total = 8 if hundred else 40
    assert [len(part) for part in (data.train_set, data.val_set, data.test_set)] == [total * 3 // 4, total // 4, 8]
    plain = ready(kind(path=str(tmp_path), augment=False, val_fraction=0.25))
    (one, labels), (two, _) = train_batches(data)[0], train_batches(data)[0]
    still, _ = train_batches(plain)[0]
    assert one.shape == (4, 3, 32, 32)
    assert torch.equal(one, two)
    assert labels.dtype == torch.int64
    assert not torch.equal(one, still)
    evaluated = [torch.cat([x for x, _ in eval_batches(module.val_dataloader())]) for module in (data, plain)]
    assert torch.equal(*evaluated)
    shares = [train_batches(data, dp_rank=rank, dp_size=2)[0][0] for rank in (0, 1)]
    assert torch.equal(torch.cat(shares), one)


@pytest.mark.parametrize("kind", [MNIST, FashionMNIST, CIFAR10, CIFAR100])
def test_missing_images_are_seen_before_anything_starts(tmp_path, kind):
    message = rf"{kind.__name__} is not in {tmp_path}.*data\.download=true"
    with pytest.raises(ConfigError, match=message):
        kind.check_arguments(path=str(tmp_path), download=False)
    with pytest.raises(ConfigError, match=message):
        kind(path=str(tmp_path), download=False)


def test_failed_downloads_are_explained(tmp_path, monkeypatch):
    from urllib.error import URLError

    from torchvision.datasets import cifar, mnist

    def fail(*args, **kwargs):
        raise URLError("no route to host")

    monkeypatch.setattr(mnist, "download_and_extract_archive", fail)
    monkeypatch.setattr(cifar, "download_and_extract_archive", fail)
    for kind in (MNIST, CIFAR10):
        with pytest.raises(
            ConfigError, match=rf"{kind.__name__} could not be downloaded to, or read from, {tmp_path}.*no route"
        ) as info:
            kind(path=str(tmp_path)).prepare_data()
        assert "data.download=false" in str(info.value)
        assert "\n" not in str(info.value)


def test_corrupt_mnist_is_explained(tmp_path):
    write_mnist(tmp_path, "MNIST")
    file = tmp_path / "MNIST/raw/train-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:-100])
    for download in (True, False):
        with pytest.raises(ConfigError, match=rf"MNIST .*{tmp_path}.*invalid for input"):
            ready(MNIST(path=str(tmp_path), download=download))


def test_a_folder_of_images(tmp_path):
    write_images(tmp_path, ["train", "val"])
    data = ready(ImageFolder(path=str(tmp_path), image_size=16, num_workers=0))
    assert (data.num_classes, len(data.train_set), len(data.val_set), data.test_set) == (2, 8, 8, data.val_set)
    images, labels = train_batches(data)[0]
    assert (images.shape, images.dtype, labels.dtype) == ((4, 3, 16, 16), torch.float32, torch.int64)
    assert torch.equal(torch.cat([y for _, y in eval_batches(data.val_dataloader())]), torch.tensor([0] * 4 + [1] * 4))


def test_a_folder_without_parts_is_split(tmp_path):
    write_images(tmp_path, [""])
    data = ready(ImageFolder(path=str(tmp_path), image_size=16, val_fraction=0.25, num_workers=0))
    assert sorted([*data.train_set.indices, *data.val_set.indices]) == list(range(8))
    assert [i // 4 for i in data.val_set.indices] == [0, 1]


def test_bad_folders_of_images(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.path=.*nowhere is not a folder"):
        ImageFolder.check_arguments(path=str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="has no folders in it"):
        ImageFolder.check_arguments(path=str(tmp_path / "empty"))
    write_images(tmp_path / "unlike", ["train"])
    write_images(tmp_path / "unlike", ["val"], classes=("cat", "emu"))
    with pytest.raises(ConfigError, match=r"'emu'.*'dog'.*the same"):
        ImageFolder.check_arguments(path=str(tmp_path / "unlike"))
    write_images(tmp_path / "broken", ["train", "val"])
    (tmp_path / "broken/train/cat/0.png").write_bytes(b"not an image")
    data = ready(ImageFolder(path=str(tmp_path / "broken"), image_size=16, num_workers=0))
    with pytest.raises(ConfigError, match=r"cat/0\.png is not a readable image"):
        train_batches(data)


# text and tokens


def test_the_default_text_is_the_standard_library():
    data = ready(Text())
    assert 1_000_000 < sum(map(len, data.train_set.parts + data.val_set.parts)) < 2_000_000
    tokens, targets = eval_batches(data.val_dataloader())[0]
    assert tokens.shape == targets.shape == (4, 64)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(tokens[1:, 0], targets[:-1, -1])  # windows follow one another
    sample = data.decode(tokens[0].tolist())
    assert data.encode(sample) == tokens[0].tolist()
    assert data.vocab_size == len(data.vocabulary.characters) < 500


def test_text_is_split_by_position(tmp_path):
    text = "".join(chr(97 + i % 26) for i in range(200))
    (tmp_path / "a.txt").write_text(text[:150])
    (tmp_path / "b.txt").write_text(text[150:199])
    (tmp_path / "c.md").write_text("ignored é")
    data = ready(Text(path=str(tmp_path), context=9, val_fraction=0.2))
    joined = text[:150] + "\n" + text[150:199]
    assert data.vocab_size == 27
    assert data.decode(data.train_set.parts[0].tolist()) == joined[:160]
    assert data.decode(data.val_set.parts[0].tolist()) == joined[160:]
    assert (len(data.train_set), len(data.val_set)) == (159 // 9, 39 // 9)


def test_bytes_of_a_text_that_is_no_unicode(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(256)))
    data = ready(Text(path=str(tmp_path / "a.txt"), unit="byte", context=8))
    assert data.vocab_size == 256
    assert data.train_set[1][0].tolist() == list(range(8, 16))
    with pytest.raises(ConfigError, match=r"a\.txt is not UTF-8 text \(byte 0x80 at 128\)"):
        ready(Text(path=str(tmp_path / "a.txt"), context=8))


def test_bad_text_arguments(tmp_path):
    (tmp_path / "a.txt").write_text("short")
    for arguments, message in (
        ({"path": str(tmp_path / "gone")}, r"data\.path=.*gone does not exist"),
        ({"path": str(tmp_path), "suffix": ".md"}, r"no files that end in '\.md'"),
        ({"unit": "word"}, "data.unit=word is unknown: use char or byte"),
        ({"context": 0}, "data.context=0 is too small"),
        ({"val_fraction": 1.0}, "data.val_fraction=1.0"),
        ({"val_fraction": 0}, "data.val_fraction=0"),
    ):
        with pytest.raises(ConfigError, match=message):
            Text.check_arguments(**arguments)
    with pytest.raises(ConfigError, match=r"data\.context=8 is too long for the 5 tokens of training text"):
        ready(Text(path=str(tmp_path), context=8))


TEXTS = {"/a/input.txt": b"to be or not to be, " * 50, "/b/input.txt": b"abc" * 300, "/cut.txt": b"cut short"}


class Texts(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.path)
        text = TEXTS.get(self.path)
        if text is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(text) + (self.path == "/cut.txt")))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    """An HTTP server on this machine; `server.url` and the paths `server.asked` for."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Texts) as server:
        server.asked, server.url = [], f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_text_is_downloaded_once_and_not_before_prepare_data(tmp_path, server):
    url, text = f"{server.url}/a/input.txt", TEXTS["/a/input.txt"]
    given = {"url": url, "sha256": hashlib.sha256(text).hexdigest().upper(), "download_folder": str(tmp_path / "data")}
    Text.check_arguments(**given)
    data = Text(**given)
    assert getattr(data, "vocab_size", None) is None, "model.vocab_size=auto has to wait for the download"
    assert server.asked == []
    ready(data)
    assert data.vocab_size == len(set(text))
    parts = [data.decode(part.tolist()) for part in (data.train_set.parts[0], data.val_set.parts[0])]
    assert "".join(parts).encode() == text
    assert Text(**given).vocab_size == data.vocab_size, "known before the start once it is there"
    ready(Text(**given))
    ready(Text(**given | {"sha256": None}))
    assert server.asked == ["/a/input.txt"]
    (file,) = (tmp_path / "data").iterdir()
    file.write_bytes(b"damaged")
    assert ready(Text(**given)).vocab_size == data.vocab_size
    assert len(server.asked) == 2


def test_downloads_of_one_name_do_not_mix_and_a_path_needs_none(tmp_path, server):
    folder = str(tmp_path / "data")
    sizes = [ready(Text(url=f"{server.url}/{k}/input.txt", download_folder=folder)).vocab_size for k in "ab"]
    assert sizes == [len(set(TEXTS[f"/{k}/input.txt"])) for k in "ab"]
    (tmp_path / "own.txt").write_text("xy" * 500)
    own = ready(Text(path=str(tmp_path / "own.txt"), url=f"{server.url}/gone.txt", sha256="0" * 64))
    assert own.vocab_size == 2
    assert len(server.asked) == 2


def test_failed_downloads_of_a_text_are_explained(tmp_path, server):
    folder = tmp_path / "data"
    (tmp_path / "file").write_text("")
    with http.server.HTTPServer(("127.0.0.1", 0), Texts) as closed:
        nobody = f"http://127.0.0.1:{closed.server_address[1]}"
    for url, more, reason in (
        (f"{nobody}/a/input.txt", {}, "Connection refused"),
        (f"{server.url}/gone.txt", {}, "404"),
        (f"{server.url}/gone.txt?key=private", {}, "404"),
        (f"{server.url}/cut.txt", {}, "IncompleteRead"),
        (f"{server.url}/b/input.txt", {"sha256": "0" * 64}, "its sha256 is .*, expected 0000"),
        (f"{server.url}/b/input.txt", {"download_folder": str(tmp_path / "file")}, "File exists"),
    ):
        data = Text(**{"url": url, "download_folder": str(folder)} | more)
        shown = re.escape(url.partition("?")[0])
        with pytest.raises(ConfigError, match=rf"^{shown} could not be downloaded to {tmp_path}.*{reason}") as info:
            data.prepare_data()
        assert "download the file yourself and type data.path=" in str(info.value)
        assert "\n" not in str(info.value)
        assert "private" not in str(info.value)
        assert not folder.exists() or not list(folder.iterdir())


def test_bad_addresses_of_a_text():
    for arguments, message in (
        ({"url": "file:///etc/passwd"}, r"data\.url=file:///etc/passwd is no address of a text: use http"),
        ({"url": "input.txt"}, r"data\.url=input\.txt is no address"),
        ({"url": "https://me:private@host/a.txt"}, r"data\.url=https://host/a\.txt is no address"),
        ({"url": "https://host"}, r"data\.url=https://host is no address"),
        ({"url": "https://host/a.txt", "sha256": "86c4"}, r"data\.sha256=86c4 is no checksum"),
        ({"sha256": "0" * 64}, r"data\.sha256=0+ checks a download, and there is none"),
    ):
        with pytest.raises(ConfigError, match=message):
            Text.check_arguments(**arguments)


@pytest.mark.parametrize("vocab_size", [50, 70_000])
def test_windows_lie_across_shards(tmp_path, vocab_size):
    ids = np.arange(100) * (vocab_size // 100)
    for k, (start, stop) in enumerate([(0, 7), (7, 8), (8, 50), (50, 100)]):
        write_shard(tmp_path / f"train_{k:05d}.tokens", ids[start:stop], vocab_size=vocab_size)
    write_shard(tmp_path / "val_00000.tokens", ids[:20], vocab_size=vocab_size)
    data = ready(Tokens(path=str(tmp_path), context=8, verify=True))
    assert data.vocab_size == vocab_size
    tokens, targets = data.train_set.__getitems__(list(range(len(data.train_set))))
    assert len(data.train_set) == 12
    assert tokens.flatten().tolist() == ids[:96].tolist()
    assert targets.flatten().tolist() == ids[1:97].tolist()
    assert torch.equal(data.train_set[5][0], tokens[5])
    again = pickle.loads(pickle.dumps(data.train_set))  # as to a spawned worker
    assert torch.equal(again[5][1], targets[5])
    assert len(pickle.dumps(data.train_set)) < 3000


def damage(path, offset, value):
    data = bytearray(path.read_bytes())
    data[offset : offset + len(value)] = value
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"NOTTOKEN", r"expected the magic b'SHRDTOKS', found b'NOTTOKEN'"),
        (8, struct.pack("<I", 9), "expected version 1, found 9"),
        (12, struct.pack("<I", 3), "expected 2 or 4 bytes per id, found 3"),
        (16, struct.pack("<Q", 51), "expected 166 bytes for 51 ids, found 164 bytes"),
        (HEADER.size + 20, b"\xff\xff", "expected ids below the vocabulary size 50, found 65535 at 10"),
    ],
)
def test_corrupt_shards_are_named(tmp_path, offset, value, message):
    for split in ("train", "val"):
        write_shard(tmp_path / f"{split}_00000.tokens", np.arange(50), vocab_size=50)
    file = tmp_path / "val_00000.tokens"
    damage(file, offset, value)
    with pytest.raises(ConfigError, match=rf"{file} is corrupt: {message}"):
        Tokens.check_arguments(path=str(tmp_path), context=8)


def test_a_changed_shard_fails_its_checksum_only_if_asked(tmp_path):
    for split in ("train", "val"):
        write_shard(tmp_path / f"{split}_00000.tokens", np.arange(50), vocab_size=50)
    damage(tmp_path / "train_00000.tokens", HEADER.size, b"\x07\x00")
    ready(Tokens(path=str(tmp_path), context=8))
    with pytest.raises(ConfigError, match=r"train_00000\.tokens is corrupt: expected SHA-256"):
        ready(Tokens(path=str(tmp_path), context=8, verify=True))


def test_bad_token_folders(tmp_path):
    with pytest.raises(ConfigError, match=r"is not a folder.*shardwise tokenize"):
        Tokens.check_arguments(path=str(tmp_path / "gone"))
    write_shard(tmp_path / "train_00000.tokens", np.arange(50), vocab_size=50)
    with pytest.raises(ConfigError, match=r"no val_\*\.tokens"):
        Tokens.check_arguments(path=str(tmp_path), context=8)
    write_shard(tmp_path / "val_00000.tokens", np.arange(50), vocab_size=60)
    with pytest.raises(ConfigError, match=r"vocabulary of 60 but .* one of 50"):
        Tokens.check_arguments(path=str(tmp_path), context=8)
    with pytest.raises(ConfigError, match=r"context=50 is too long for the 50 tokens.*at most 49"):
        Tokens.check_arguments(path=str(tmp_path), context=50)
    (tmp_path / "train_00000.tokens").write_bytes(MAGIC)
    with pytest.raises(ConfigError, match="a header of 64 bytes, found 8 bytes"):
        read_header(tmp_path / "train_00000.tokens")


def make_tokenizer(path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "cat": 2, "sat": 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))


@pytest.mark.parametrize("kind", ["byte", "char", "json"])
def test_tokenize_and_train_on_it(tmp_path, kind):
    source, destination = tmp_path / "texts", tmp_path / "made" / "tokens"
    source.mkdir()
    texts = {"a": "the cat sat " * 20, "b": "sat the cat " * 40}
    for name, text in texts.items():
        (source / f"{name}.txt").write_text(text)
    tokenizer = kind
    if kind == "json":
        tokenizer = str(tmp_path / "words.json")
        make_tokenizer(tokenizer)
    result = tokenize(source, destination, tokenizer=tokenizer, val_fraction=0.25, shard_tokens=50)
    data = ready(Tokens(path=str(destination), context=5, verify=True))
    sizes = [len(shard) for shard in data.shards["train"]]
    assert sizes[:-1] == [50] * (len(sizes) - 1)
    assert sum(sizes) == result.train_tokens
    assert data.vocab_size == result.vocab_size == {"byte": 256, "char": 7, "json": 4}[kind]
    # three quarters of each file, in the order of their names
    kept = data.decode(list(itertools.chain(*(shard.ids.tolist() for shard in data.shards["train"]))))
    assert kept.split() == (texts["a"][: 240 * 3 // 4] + texts["b"][: 480 * 3 // 4]).split()
    assert data.decode(data.encode("the cat")) == "the cat"
    assert [path.name for path in destination.parent.iterdir()] == ["tokens"]  # nothing half-made lies about


def test_the_ids_of_a_tokenizer_may_have_gaps(tmp_path):
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"[UNK]": 0, "the": 300}, unk_token="[UNK]")).save(str(tmp_path / "gaps.json"))
    vocabulary = JSONTokenizer(tmp_path / "gaps.json")
    assert vocabulary.size == 301
    assert vocabulary.encode(b"the").tolist() == [300]


def test_tokenize_never_overwrites_without_force(tmp_path, capsys):
    source, destination = tmp_path / "a.txt", tmp_path / "out"
    source.write_text("abc" * 100)
    arguments = [str(source), str(destination), "--tokenizer", "char"]
    assert main([*arguments, "--shard-tokens", "20"]) == 0
    assert "270 training and 30 validation tokens, vocabulary of 3" in capsys.readouterr().out
    (destination / "notes.md").write_text("mine")
    before = {path.name: path.read_bytes() for path in destination.iterdir()}
    assert main(arguments) == 2
    assert "is not empty" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in destination.iterdir()} == before
    assert main([*arguments, "--force"]) == 0
    names = sorted(path.name for path in destination.iterdir())
    assert names == ["notes.md", "train_00000.tokens", "val_00000.tokens", "vocabulary.json"]
    assert len(TokenShard(destination / "train_00000.tokens")) == 270
    assert json.loads((destination / "vocabulary.json").read_text())["characters"] == "abc"


def test_bad_input_to_tokenize(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("abc" * 100)
    (tmp_path / "bad.json").write_text("{}")
    source, out = str(tmp_path / "a.txt"), str(tmp_path / "out")
    for arguments, message in (
        ([str(tmp_path / "gone"), out], "SOURCE=.*gone does not exist"),
        ([source, source], "is a file"),
        ([source, str(tmp_path / "a.txt" / "out")], "cannot be written"),
        ([source, out, "--val-fraction", "1"], "validation fraction 1.0"),
        ([source, out, "--shard-tokens", "0"], "at least 1"),
        ([source, out, "--tokenizer", "words"], "tokenizer words does not exist"),
        ([source, out, "--tokenizer", str(tmp_path / "bad.json")], "not a tokenizers JSON file"),
        ([source, out, "--val-fraction", "0.001"], "above 0"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert re.search(message, error), error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "bad.json"]


def test_tokenize_starts_without_torch():
    code = "import sys, shardwise.data.tokenize; print([m for m in ('torch', 'tokenizers') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.strip() == "[]"


# synthetic


def test_synthetic_images_are_fixed_and_of_any_size():
    data = ready(SyntheticImages(num_samples=10**9, image_size=12, in_channels=2, num_classes=5))
    assert len(data.train_set) == 10**9
    images, labels = data.train_set.__getitems__([3, 10**9 - 1])
    assert (images.shape, images.dtype, labels.dtype) == ((2, 2, 12, 12), torch.float32, torch.int64)
    again = ready(SyntheticImages(num_samples=10**9, image_size=12, in_channels=2, num_classes=5)).train_set[3]
    assert torch.equal(again[0], images[0])
    assert not torch.equal(images[0], images[1])
    assert set(data.train_set.__getitems__(list(range(50)))[1].tolist()) == set(range(5))


def test_synthetic_tokens_are_fixed_and_of_any_size():
    data = ready(SyntheticTokens(num_samples=10**9, context=16, vocab_size=100))
    tokens, targets = data.train_set.__getitems__([0, 1, 10**9 - 1])
    assert tokens.shape == targets.shape == (3, 16)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert 0 <= tokens.min() <= tokens.max() < 100
    assert not torch.equal(tokens[0], tokens[1])
    with pytest.raises(ConfigError, match=r"data\.vocab_size=0"):
        SyntheticTokens.check_arguments(vocab_size=0)


# all of them


def test_every_choice_names_a_module_and_arguments_it_has():
    def load(name):
        values = yaml.safe_load((CONF / f"{name}.yaml").read_text())
        merged = {}
        for parent in values.pop("defaults", []):
            merged |= {} if parent == "_self_" else load(parent)
        return merged | values

    names = {file.stem for file in CONF.glob("*.yaml")}
    assert names >= {
        "digits", "mnist", "fashion_mnist", "cifar10", "cifar100", "imagefolder", "text", "tokens", "synthetic",
        "synthetic_images", "synthetic_tokens",
    }  # fmt: skip
    for name in names:
        values = load(name)
        if name == "custom":
            assert values == {"_target_": None}, "it is for a module of the user's"
            continue
        module, _, kind = values.pop("_target_").rpartition(".")
        parameters = inspect.signature(getattr(importlib.import_module(module), kind)).parameters
        for key, value in values.items():
            assert value in (parameters[key].default, "???"), f"{name}: {key}"  # YAML shows the defaults of the code


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("module", [Digits(), Text(context=16), SyntheticTokens(num_samples=100, context=8)])
def test_modules_work_with_a_plain_loader_too(module):
    loader = ready(module).train_dataloader()
    assert isinstance(loader, DataLoader)
    inputs, targets = next(iter(loader))
    assert len(inputs) == len(targets) == loader.batch_size


def test_digits_file_is_what_scikit_learn_ships():
    with gzip.open(digits_module.digits_file(), "rt") as file:
        assert len(file.readline().split(",")) == 65
