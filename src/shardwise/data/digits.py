"""The 1,797 handwritten digits that scikit-learn ships: real data that needs no download.

Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998 (its
test set). 8 x 8 pixels with values from 0 to 16, ten classes.
"""

import gzip
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.data.splits import SplitDataModule, TensorSamples, as_batch, check_fraction, stratified_split
from shardwise.errors import ConfigError

TEST_FRACTION = 0.2


def digits_file() -> Path:
    """Where the installed scikit-learn keeps the digits; found without importing it, which would cost a second."""
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise ConfigError("data=digits reads the digits that scikit-learn ships: pip install scikit-learn")
    path = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if not path.is_file():
        raise ConfigError(f"data=digits needs {path}, which is missing: pip install --force-reinstall scikit-learn")
    return path


class Digits(SplitDataModule):
    """Images (1, 8, 8) in [0, 1] and labels 0 to 9; 80 % for training and 20 % for test, stratified, always the same.

    Validation uses the test set too, unless `val_fraction` sets a part of the training set aside for it.

    Args:
        val_fraction: the part of the training set that is used for validation instead, in [0, 1).
    """

    num_classes = 10
    in_channels = 1
    image_size = 8

    def __init__(self, *, val_fraction: float = 0.0) -> None:
        super().__init__(collate=as_batch)
        self.check_arguments(val_fraction=val_fraction)
        self.val_fraction = val_fraction

    @classmethod
    def check_arguments(cls, *, val_fraction: float = 0.0, **_: Any) -> None:
        check_fraction(val_fraction, name="data.val_fraction")
        digits_file()

    def setup(self, stage: str | None = None) -> None:
        if self.train_set is not None:
            return
        with gzip.open(digits_file(), "rt") as file:
            table = np.loadtxt(file, delimiter=",", dtype=np.uint8)
        images = torch.from_numpy(table[:, :-1].astype(np.float32) / 16).reshape(-1, 1, 8, 8)
        labels = torch.from_numpy(table[:, -1].astype(np.int64))
        train, test = stratified_split(labels, fraction=TEST_FRACTION)
        val = test
        if self.val_fraction:
            kept, held_out = stratified_split(labels[train], fraction=self.val_fraction)
            train, val = train[kept], train[held_out]
        self.train_set, self.val_set, self.test_set = (
            TensorSamples(images[part], labels[part]) for part in (train, val, test)
        )
