"""Token shards from text: `python -m shardwise tokenize SOURCE DEST`."""

import argparse
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.data.documents import find_documents, read_document
from shardwise.data.token_shards import SUFFIX, token_dtype, write_shard
from shardwise.data.vocabulary import (
    FILE_NAME,
    TOKENIZER_NAME,
    ByteVocabulary,
    CharVocabulary,
    JSONTokenizer,
    Vocabulary,
    code_points,
)
from shardwise.errors import ConfigError

SHARD_TOKENS = 100_000_000


@dataclass(frozen=True)
class Tokenized:
    """What `tokenize` wrote."""

    destination: Path
    train_tokens: int
    val_tokens: int
    vocab_size: int


def tokenize(
    source: str | Path,
    destination: str | Path,
    *,
    tokenizer: str = "byte",
    val_fraction: float = 0.1,
    shard_tokens: int = SHARD_TOKENS,
    suffix: str = ".txt",
    force: bool = False,
) -> Tokenized:
    """Turn a text file, or the files of a folder, into token shards and a vocabulary.

    Files are read one after the other, in the order of their paths; the last `val_fraction` of each goes to validation.
    Everything is written to a temporary folder beside `destination` and moved there at the end.

    Args:
        source: a text file or a folder.
        destination: a folder. If it holds anything, it is refused, unless `force`, with which the shards and the
            vocabulary in it are replaced and everything else is left.
        tokenizer: `byte`, `char` (the characters that occur in `source`), or the path of a `tokenizers` JSON file.
        val_fraction: in (0, 1).
        shard_tokens: tokens per shard; the memory needed grows with it (2 or 4 bytes each) and with the largest file.
        suffix: which files of a folder are read.

    Raises:
        ConfigError: something that was given does not fit, or the destination cannot be written.
    """
    target = Path(destination)
    if not 0 < val_fraction < 1:
        raise ConfigError(f"the validation fraction {val_fraction} is no fraction: use a value above 0, below 1")
    if shard_tokens < 1:
        raise ConfigError(f"{shard_tokens} tokens per shard are too few: use at least 1")
    files = find_documents(source, suffix=suffix, name="SOURCE")
    if target.exists() and not target.is_dir():
        raise ConfigError(f"the destination {target} is a file: name a folder that does not exist yet")
    if target.is_dir() and any(target.iterdir()) and not force:
        raise ConfigError(
            f"the destination {target} is not empty: name a new folder, or replace its shards with --force"
        )
    vocabulary = _vocabulary(tokenizer, files)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
        try:
            result = _write(files, staging, target, vocabulary, val_fraction=val_fraction, shard_tokens=shard_tokens)
            _move(staging, target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"the destination {target} cannot be written ({error.strerror}): choose another") from error
    return result


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m shardwise tokenize",
        description="Turn text into memory-mapped token shards, for data=tokens data.path=DEST.",
    )
    parser.add_argument("source", metavar="SOURCE", help="a text file, or a folder of them")
    parser.add_argument("destination", metavar="DEST", help="a folder that does not exist yet")
    parser.add_argument(
        "--tokenizer", default="byte", help="byte, char, or a tokenizers JSON file (default: %(default)s)"
    )
    parser.add_argument(
        "--val-fraction",
        type=float,
        default=0.1,
        help="the last part of every file, for validation (default: %(default)s)",
    )
    parser.add_argument(
        "--shard-tokens", type=int, default=SHARD_TOKENS, help="tokens per shard (default: %(default)s)"
    )
    parser.add_argument("--suffix", default=".txt", help="which files of a folder are read (default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="replace the shards in a folder that is not empty")
    arguments = parser.parse_args(argv)
    try:
        result = tokenize(
            arguments.source,
            arguments.destination,
            tokenizer=arguments.tokenizer,
            val_fraction=arguments.val_fraction,
            shard_tokens=arguments.shard_tokens,
            suffix=arguments.suffix,
            force=arguments.force,
        )
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(
        f"{result.destination}: {result.train_tokens:,} training and {result.val_tokens:,} validation tokens,"
        f" vocabulary of {result.vocab_size:,}"
    )
    # A window is its context and one token more.
    context = min(1024, result.train_tokens - 1, *([result.val_tokens - 1] if result.val_tokens else []))
    where = f"data.path={shlex.quote(str(result.destination))} data.context={max(context, 1)}"
    print(f"train on them with: python train.py task=language_model model=gpt data=tokens {where}")
    return 0


class _ShardWriter:
    """Cuts a sequence of ids into shards of `shard_tokens`, whatever the pieces it comes in."""

    def __init__(self, folder: Path, *, split: str, vocab_size: int, shard_tokens: int) -> None:
        self.folder, self.split = folder, split
        self.vocab_size, self.shard_tokens = vocab_size, shard_tokens
        self.total = 0
        self._pieces: list[NDArray[Any]] = []
        self._pending = 0
        self._num_shards = 0

    def write(self, ids: NDArray[Any]) -> None:
        self.total += len(ids)
        while len(ids):
            piece = ids[: self.shard_tokens - self._pending].astype(token_dtype(self.vocab_size))
            ids = ids[len(piece) :]
            self._pieces.append(piece)
            self._pending += len(piece)
            if self._pending == self.shard_tokens:
                self.flush()

    def flush(self) -> None:
        if self._pending:
            path = self.folder / f"{self.split}_{self._num_shards:05d}{SUFFIX}"
            write_shard(path, np.concatenate(self._pieces), vocab_size=self.vocab_size)
            self._pieces, self._pending = [], 0
            self._num_shards += 1


def _vocabulary(tokenizer: str, files: list[Path]) -> Vocabulary:
    if tokenizer == "byte":
        return ByteVocabulary()
    if tokenizer == "char":
        return CharVocabulary.of(code_points(read_document(file), name=str(file)) for file in files)
    return JSONTokenizer(tokenizer)


def _write(
    files: list[Path], folder: Path, target: Path, vocabulary: Vocabulary, *, val_fraction: float, shard_tokens: int
) -> Tokenized:
    train, val = (
        _ShardWriter(folder, split=split, vocab_size=vocabulary.size, shard_tokens=shard_tokens)
        for split in ("train", "val")
    )
    for file in files:
        ids = vocabulary.encode(read_document(file))
        cut = len(ids) - round(val_fraction * len(ids))
        train.write(ids[:cut])
        val.write(ids[cut:])
    train.flush()
    val.flush()
    if not train.total or not val.total:
        raise ConfigError(
            f"{len(files)} files give {train.total} training and {val.total} validation tokens: give more text or"
            " another fraction, so that both are above 0"
        )
    vocabulary.save(folder)
    return Tokenized(target, train.total, val.total, vocabulary.size)


def _move(staging: Path, target: Path) -> None:
    """Put what was written into `target`, in place of the shards that are there."""
    staging.chmod(0o777 & ~_umask())  # mkdtemp makes folders that only their owner can read
    if not target.exists():
        os.rename(staging, target)
        return
    new = {file.name for file in staging.iterdir()}
    for split in ("train", "val"):
        for old in target.glob(f"{split}_*{SUFFIX}"):
            if old.name not in new:
                old.unlink()
    for name in (FILE_NAME, TOKENIZER_NAME):
        if name not in new:
            (target / name).unlink(missing_ok=True)
    for file in staging.iterdir():
        os.replace(file, target / file.name)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


if __name__ == "__main__":
    sys.exit(main())
