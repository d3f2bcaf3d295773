"""Text to token ids and back: bytes, characters, or a `tokenizers` JSON file."""

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import ConfigError

FILE_NAME = "vocabulary.json"
TOKENIZER_NAME = "tokenizer.json"
_NUM_CODE_POINTS = 0x110000


class Vocabulary(Protocol):
    """What turns text into ids in [0, size) and back."""

    @property
    def size(self) -> int: ...

    def encode(self, text: bytes) -> NDArray[Any]:
        """The ids of UTF-8 encoded `text`, (n,), of an unsigned type."""

    def decode(self, ids: Sequence[int]) -> str: ...

    def save(self, folder: Path) -> None:
        """Write the vocabulary into `folder`, for `load_vocabulary`."""


def smallest_dtype(size: int) -> type[np.uint8] | type[np.uint16] | type[np.uint32]:
    """The narrowest unsigned type for ids in [0, size)."""
    return np.uint8 if size <= 2**8 else np.uint16 if size <= 2**16 else np.uint32


def decode_utf8(text: bytes, *, name: str = "the text") -> str:
    """`text` as a string; a `ConfigError` that mentions `name` where it is not UTF-8."""
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name} is not UTF-8 text (byte {text[error.start]:#04x} at {error.start}): take bytes as tokens"
        ) from error


def code_points(text: bytes, *, name: str = "the text") -> NDArray[np.uint32]:
    """The Unicode code points of UTF-8 encoded `text`, (n,)."""
    return np.frombuffer(decode_utf8(text, name=name).encode("utf-32-le"), dtype=np.uint32)


def load_vocabulary(folder: str | Path) -> Vocabulary:
    """The vocabulary that was saved in `folder`."""
    path = Path(folder) / FILE_NAME
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        if fields["kind"] == "byte":
            return ByteVocabulary()
        if fields["kind"] == "char":
            return CharVocabulary(fields["characters"])
        if fields["kind"] == "tokenizers":
            return JSONTokenizer(Path(folder) / TOKENIZER_NAME)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a vocabulary ({type(error).__name__}: {error}): tokenize again") from error
    raise ConfigError(f"{path} has the unknown kind {fields['kind']!r}: expected byte, char or tokenizers")


class ByteVocabulary:
    """The 256 bytes of UTF-8."""

    size = 256

    def encode(self, text: bytes) -> NDArray[Any]:
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")

    def save(self, folder: Path) -> None:
        _write(folder, {"kind": "byte", "vocab_size": self.size})


class CharVocabulary:
    """The characters that occur, sorted by code point."""

    def __init__(self, characters: str) -> None:
        self.characters = "".join(sorted(set(characters)))
        self._ids = np.full(_NUM_CODE_POINTS, -1, dtype=np.int32)
        self._ids[[ord(character) for character in self.characters]] = np.arange(self.size)

    @classmethod
    def of(cls, texts: Iterable[NDArray[np.uint32]]) -> "CharVocabulary":
        """The vocabulary of texts given as code points."""
        occurs = np.zeros(_NUM_CODE_POINTS, dtype=bool)
        for text in texts:
            occurs[text] = True
        return cls("".join(map(chr, np.flatnonzero(occurs))))

    @property
    def size(self) -> int:
        return len(self.characters)

    def encode(self, text: bytes) -> NDArray[Any]:
        points = code_points(text)
        ids = self._ids[points]
        if len(ids) and ids.min() < 0:
            unknown = chr(points[int(np.argmin(ids))])
            raise ConfigError(f"the character {unknown!r} is not among the {self.size} of the vocabulary: use bytes")
        return ids.astype(smallest_dtype(self.size))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.characters[int(i)] for i in ids)

    def save(self, folder: Path) -> None:
        _write(folder, {"kind": "char", "vocab_size": self.size, "characters": self.characters})


class JSONTokenizer:
    """A tokenizer in the format of the `tokenizers` library; no special tokens are added."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ConfigError(
                f"the tokenizer {path} does not exist: use byte, char, or the path of a tokenizers JSON file"
            )
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(self.path))
        except Exception as error:  # the library raises plain Exception
            raise ConfigError(
                f"{path} is not a tokenizers JSON file ({error}): save one with Tokenizer.save"
            ) from error
        # Not the number of tokens: ids may have gaps.
        self.size = 1 + max(self._tokenizer.get_vocab().values(), default=-1)

    def encode(self, text: bytes) -> NDArray[Any]:
        ids = self._tokenizer.encode(decode_utf8(text), add_special_tokens=False).ids
        return np.array(ids, dtype=smallest_dtype(self.size))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False))

    def save(self, folder: Path) -> None:
        shutil.copyfile(self.path, folder / TOKENIZER_NAME)
        _write(folder, {"kind": "tokenizers", "vocab_size": self.size, "file": TOKENIZER_NAME})


def _write(folder: Path, fields: dict[str, Any]) -> None:
    (folder / FILE_NAME).write_text(json.dumps(fields, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
