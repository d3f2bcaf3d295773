"""Characters or bytes of a file or a folder; by default, of the Python standard library's own sources."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.data.documents import find_documents, read_document, standard_library
from shardwise.data.splits import SplitDataModule, as_batch, check_at_least_one, check_fraction
from shardwise.data.vocabulary import ByteVocabulary, CharVocabulary, Vocabulary, code_points
from shardwise.data.windows import TokenWindows
from shardwise.errors import ConfigError

UNITS = ("char", "byte")


class Text(SplitDataModule):
    """Windows of a text that is held in memory; the last `val_fraction` of it is for validation, and for test too.

    The files of a folder are joined by a newline, in the order of their paths.

    Args:
        path: a text file or a folder; None for the standard library's sources (2 MB, fixed by the Python version).
        unit: what a token is, `char` (the vocabulary is the characters that occur, sorted) or `byte`.
        context: tokens per sample.
        val_fraction: in (0, 1).
        suffix: which files of a folder are read.
        num_workers: processes that load samples, per rank.
    """

    def __init__(
        self,
        *,
        path: str | None = None,
        unit: str = "char",
        context: int = 64,
        val_fraction: float = 0.1,
        suffix: str = ".txt",
        num_workers: int = 0,
    ) -> None:
        super().__init__(num_workers=num_workers, collate=as_batch)
        self.check_arguments(path=path, unit=unit, context=context, val_fraction=val_fraction, suffix=suffix)
        self.path = path
        self.unit = unit
        self.context = context
        self.val_fraction = val_fraction
        self.suffix = suffix
        self._vocabulary: Vocabulary | None = ByteVocabulary() if unit == "byte" else None
        self._ids: NDArray[Any] | None = None

    @classmethod
    def check_arguments(
        cls,
        *,
        path: str | None = None,
        unit: str = "char",
        context: int = 64,
        val_fraction: float = 0.1,
        suffix: str = ".txt",
        **_: Any,
    ) -> None:
        if unit not in UNITS:
            raise ConfigError(f"data.unit={unit} is unknown: use {' or '.join(UNITS)}")
        check_at_least_one(**{"data.context": context})
        check_fraction(val_fraction, name="data.val_fraction", zero=False)
        if path is not None:
            find_documents(path, suffix=suffix)

    @property
    def vocabulary(self) -> Vocabulary:
        """Of characters, it takes reading the text, which this does if `setup` has not."""
        if self._vocabulary is None:
            self._load()
        assert self._vocabulary is not None
        return self._vocabulary

    @property
    def vocab_size(self) -> int:
        return self.vocabulary.size

    def encode(self, text: str) -> list[int]:
        return self.vocabulary.encode(text.encode()).tolist()

    def decode(self, ids: Sequence[int]) -> str:
        return self.vocabulary.decode(ids)

    def setup(self, stage: str | None = None) -> None:
        if self.train_set is not None:
            return
        ids = self._load()
        cut = len(ids) - round(self.val_fraction * len(ids))
        train, val = (TokenWindows([part], context=self.context) for part in (ids[:cut], ids[cut:]))
        for windows, part in ((train, "training"), (val, "validation")):
            if len(windows) == 0:
                raise ConfigError(
                    f"data.context={self.context} is too long for the {windows.borders[-1]} tokens of {part} text:"
                    f" use at most {max(1, int(windows.borders[-1]) - 1)}, a longer text, or another data.val_fraction"
                )
        self.train_set, self.val_set, self.test_set = train, val, val

    def _load(self) -> NDArray[Any]:
        if self._ids is None:
            files = standard_library() if self.path is None else find_documents(self.path, suffix=self.suffix)
            texts = [read_document(file) for file in files]
            if self.unit == "char":
                points = (code_points(text, name=str(file)) for text, file in zip(texts, files, strict=True))
                newline = np.array([ord("\n")] if len(texts) > 1 else [], dtype=np.uint32)
                self._vocabulary = CharVocabulary.of([*points, newline])
            self._ids = self.vocabulary.encode(b"\n".join(texts))
        return self._ids
