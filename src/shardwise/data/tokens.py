"""Token ids that were made before, memory-mapped: for texts that do not fit in memory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.data.splits import SplitDataModule, as_batch, check_at_least_one
from shardwise.data.token_shards import TokenShard, find_shards
from shardwise.data.vocabulary import Vocabulary, load_vocabulary
from shardwise.data.windows import TokenWindows
from shardwise.errors import ConfigError


class Tokens(SplitDataModule):
    """Windows of the shards in a folder that `python -m shardwise tokenize` wrote; test is the same as validation.

    Args:
        path: the folder, with `train_*.tokens` and `val_*.tokens`.
        context: tokens per sample.
        verify: compare every shard's checksum first, which reads all of them, in every process.
        num_workers: processes that load samples, per rank.
    """

    def __init__(self, *, path: str, context: int = 1024, verify: bool = False, num_workers: int = 0) -> None:
        super().__init__(num_workers=num_workers, collate=as_batch)
        self.shards = self._open(path, context=context)
        self.path = path
        self.context = context
        self.verify = verify
        self.vocab_size = self.shards["train"][0].header.vocab_size

    @classmethod
    def check_arguments(cls, *, path: str, context: int = 1024, **_: Any) -> None:
        cls._open(path, context=context)

    @property
    def vocabulary(self) -> Vocabulary:
        return load_vocabulary(self.path)

    def encode(self, text: str) -> list[int]:
        return self.vocabulary.encode(text.encode()).tolist()

    def decode(self, ids: Sequence[int]) -> str:
        return self.vocabulary.decode(ids)

    def prepare_data(self) -> None:
        if self.verify:
            for shards in self.shards.values():
                for shard in shards:
                    shard.verify()

    def setup(self, stage: str | None = None) -> None:
        self.train_set = TokenWindows(self.shards["train"], context=self.context)
        self.val_set = self.test_set = TokenWindows(self.shards["val"], context=self.context)

    @staticmethod
    def _open(path: str, *, context: int) -> dict[str, list[TokenShard]]:
        check_at_least_one(**{"data.context": context})
        folder = Path(path)
        if not folder.is_dir():
            raise ConfigError(
                f"data.path={path} is not a folder: make one with `python -m shardwise tokenize SOURCE {path}`"
            )
        shards = {split: [TokenShard(file) for file in find_shards(folder, split=split)] for split in ("train", "val")}
        for split, parts in shards.items():
            if not parts:
                raise ConfigError(
                    f"data.path={path} has no {split}_*.tokens: make them with"
                    " `python -m shardwise tokenize SOURCE DEST`"
                )
            if (count := sum(map(len, parts))) <= context:
                raise ConfigError(
                    f"data.context={context} is too long for the {count} tokens in {path}/{split}_*.tokens: use at most"
                    f" {max(1, count - 1)}, or more text"
                )
        first, *others = shards["train"] + shards["val"]
        for shard in others:
            if shard.header.vocab_size != first.header.vocab_size:
                raise ConfigError(
                    f"{shard.path} has a vocabulary of {shard.header.vocab_size} but {first.path} one of"
                    f" {first.header.vocab_size}: keep shards of different tokenizers in different folders"
                )
        return shards
