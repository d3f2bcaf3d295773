"""Characters or bytes of a file, a folder or a download; by default, of the Python standard library's own sources."""

import hashlib
import re
import uuid
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import numpy as np
from numpy.typing import NDArray

from shardwise.data.documents import find_documents, read_document, standard_library
from shardwise.data.splits import SplitDataModule, as_batch, check_at_least_one, check_fraction
from shardwise.data.vocabulary import ByteVocabulary, CharVocabulary, Vocabulary, code_points
from shardwise.data.windows import TokenWindows
from shardwise.errors import ConfigError

UNITS = ("char", "byte")
URL = r"https?://[\w.-]+(:\d+)?/\S+"
"""What can be downloaded: no files of this machine by another scheme, no password."""
DOWNLOAD_TIMEOUT = 60.0
"""Seconds that a server may say nothing."""


def download(url: str, file: Path, *, sha256: str | None = None) -> None:
    """Fetch `url` into `file`, unless that is there and has the checksum; nobody ever sees a part of it.

    Raises:
        ConfigError: it cannot be fetched or written, or the checksum is another.
    """
    partial = file.with_name(f"{file.name}.{uuid.uuid4().hex}.partial")
    try:
        if file.is_file() and sha256 in (None, hashlib.sha256(file.read_bytes()).hexdigest()):
            return
        # Not torch.hub.download_url_to_file: that waits for ever, and takes a cut connection for the end of the file.
        with urlopen(url, timeout=DOWNLOAD_TIMEOUT) as response:
            content = response.read()
        found = hashlib.sha256(content).hexdigest()
        if sha256 not in (None, found):
            raise ValueError(f"its sha256 is {found}, expected {sha256}")
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_bytes(content)
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)
    except (OSError, HTTPException, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{_public(url)} could not be downloaded to {file.parent.absolute()} ({reason}): check the network, or"
            " download the file yourself and type data.path=<that file>"
        ) from error


def _public(url: str) -> str:
    """`url` without what may be a secret in it: the name and password before the host, and the query."""
    return re.sub("//[^/]*@", "//", url).partition("?")[0]


class Text(SplitDataModule):
    """Windows of a text that is held in memory; the last `val_fraction` of it is for validation, and for test too.

    The files of a folder are joined by a newline, in the order of their paths.

    Args:
        path: a text file or a folder; None for what is at `url`, and without that, for the standard library's sources
            (2 MB, fixed by the Python version).
        url: a text to download, once, in `prepare_data`; not used with a `path`.
        sha256: of what is at `url`, in hexadecimal; None takes anything.
        download_folder: where downloads are kept.
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
        url: str | None = None,
        sha256: str | None = None,
        download_folder: str = "data",
        unit: str = "char",
        context: int = 64,
        val_fraction: float = 0.1,
        suffix: str = ".txt",
        num_workers: int = 0,
    ) -> None:
        super().__init__(num_workers=num_workers, collate=as_batch)
        self.check_arguments(
            path=path, url=url, sha256=sha256, unit=unit, context=context, val_fraction=val_fraction, suffix=suffix
        )
        self.path = path
        self.url = url
        self.sha256 = None if sha256 is None else str(sha256).lower()
        self.download_folder = download_folder
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
        url: str | None = None,
        sha256: str | None = None,
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
        if url is not None and not re.fullmatch(URL, str(url)):
            raise ConfigError(f"data.url={_public(str(url))} is no address of a text: use http(s)://<host>/<file>")
        if sha256 is not None and not re.fullmatch("[0-9a-fA-F]{64}", str(sha256)):
            raise ConfigError(f"data.sha256={sha256} is no checksum: use the 64 hexadecimal digits of sha256sum")
        if sha256 is not None and url is None and path is None:
            raise ConfigError(f"data.sha256={sha256} checks a download, and there is none: set data.url, or neither")
        if path is not None:
            find_documents(path, suffix=suffix)

    @property
    def _downloaded(self) -> Path | None:
        """Where the download is, or will be; None if nothing is to be downloaded."""
        if self.path is not None or self.url is None:
            return None
        name = Path(urlsplit(self.url).path)  # the address is in the name: many texts are called input.txt
        address = hashlib.sha256(self.url.encode()).hexdigest()[:8]
        return Path(self.download_folder) / f"{name.stem}-{address}{name.suffix}"

    @property
    def vocabulary(self) -> Vocabulary:
        """Of characters, it takes reading the text, which this does if `setup` has not."""
        if self._vocabulary is None:
            self._load()
        assert self._vocabulary is not None
        return self._vocabulary

    @property
    def vocab_size(self) -> int:
        """Raises AttributeError as long as it takes a download to know it."""
        if self._vocabulary is None and self._downloaded is not None and not self._downloaded.is_file():
            raise AttributeError("vocab_size is not known before prepare_data() has downloaded the text")
        return self.vocabulary.size

    def encode(self, text: str) -> list[int]:
        return self.vocabulary.encode(text.encode()).tolist()

    def decode(self, ids: Sequence[int]) -> str:
        return self.vocabulary.decode(ids)

    def prepare_data(self) -> None:
        if self._downloaded is not None:
            assert self.url is not None
            download(self.url, self._downloaded, sha256=self.sha256)

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
            path = self._downloaded or self.path
            files = standard_library() if path is None else find_documents(path, suffix=self.suffix)
            texts = [read_document(file) for file in files]
            if self.unit == "char":
                points = (code_points(text, name=str(file)) for text, file in zip(texts, files, strict=True))
                newline = np.array([ord("\n")] if len(texts) > 1 else [], dtype=np.uint32)
                self._vocabulary = CharVocabulary.of([*points, newline])
            self._ids = self.vocabulary.encode(b"\n".join(texts))
        return self._ids
