"""Images or tokens of any size, made when they are asked for: to measure speed and memory without reading a disk."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from shardwise.data.splits import SplitDataModule, as_batch, check_at_least_one
from shardwise.seeds import stable_seed

NOISE_WINDOWS = 65_521  # prime, so that the windows of consecutive samples lie far apart
MAX_STRIDE = 8
_STEP = 40_503  # Knuth's multiplicative hash for 16 bits (The Art of Computer Programming 3, 6.4)


class SyntheticImageSamples(Dataset):
    """Sample i is a window of one block of noise, made brighter by its label: cheap to make, and possible to learn.

    There are 65,521 different windows; beyond that many samples only the labels differ.
    """

    deterministic = True

    def __init__(self, *, first: int, count: int, shape: tuple[int, int, int], num_classes: int) -> None:
        self.first, self.count, self.shape, self.num_classes = first, count, shape, num_classes
        generator = torch.Generator().manual_seed(stable_seed("synthetic images"))
        self.noise = torch.randn(torch.Size(shape).numel() + NOISE_WINDOWS, generator=generator)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        samples = torch.tensor(indices) + self.first
        labels = samples * 7919 % self.num_classes
        size = torch.Size(self.shape).numel()
        offsets = (samples * _STEP % NOISE_WINDOWS).tolist()
        images = torch.empty(len(indices), size)
        for image, offset, brightness in zip(images, offsets, (labels / self.num_classes).tolist(), strict=True):
            torch.add(self.noise[offset : offset + size], brightness, out=image)
        return images.reshape(-1, *self.shape), labels


class SyntheticTokenSamples(Dataset):
    """Sample i counts upwards through the vocabulary from a start and by a stride (1 to 8) of its own."""

    deterministic = True

    def __init__(self, *, first: int, count: int, context: int, vocab_size: int) -> None:
        self.first, self.count, self.vocab_size = first, count, vocab_size
        self.steps = torch.arange(context + 1)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens, targets = self.__getitems__([index])
        return tokens[0], targets[0]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        samples = torch.tensor(indices)[:, None] + self.first
        ids = (samples * _STEP + (1 + samples % MAX_STRIDE) * self.steps) % self.vocab_size
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


class SyntheticImages(SplitDataModule):
    """Classification of made images, the same in every run. Test is the same as validation.

    Args:
        num_samples: images in training; never stored.
        num_val_samples: images in validation, others than those.
        image_size: pixels along each side.
        in_channels: channels.
        num_classes: classes.
        num_workers: processes that make samples, per rank.
    """

    def __init__(
        self,
        *,
        num_samples: int = 10_000,
        num_val_samples: int = 1_000,
        image_size: int = 32,
        in_channels: int = 3,
        num_classes: int = 10,
        num_workers: int = 0,
    ) -> None:
        super().__init__(num_workers=num_workers, collate=as_batch)
        self.check_arguments(
            num_samples=num_samples,
            num_val_samples=num_val_samples,
            image_size=image_size,
            in_channels=in_channels,
            num_classes=num_classes,
        )
        self.num_samples = num_samples
        self.num_val_samples = num_val_samples
        self.image_size = image_size
        self.in_channels = in_channels
        self.num_classes = num_classes

    @classmethod
    def check_arguments(cls, *, num_workers: int = 0, **sizes: int) -> None:
        check_at_least_one(**{f"data.{name}": value for name, value in sizes.items()})

    def setup(self, stage: str | None = None) -> None:
        shape = (self.in_channels, self.image_size, self.image_size)
        make: dict[str, Any] = {"shape": shape, "num_classes": self.num_classes}
        self.train_set = SyntheticImageSamples(first=0, count=self.num_samples, **make)
        self.val_set = SyntheticImageSamples(first=self.num_samples, count=self.num_val_samples, **make)
        self.test_set = self.val_set


class SyntheticTokens(SplitDataModule):
    """Language modelling of made tokens, the same in every run. Test is the same as validation.

    Args:
        num_samples: windows in training; never stored.
        num_val_samples: windows in validation, others than those.
        context: tokens per sample.
        vocab_size: ids are below this.
        num_workers: processes that make samples, per rank.
    """

    def __init__(
        self,
        *,
        num_samples: int = 10_000,
        num_val_samples: int = 1_000,
        context: int = 256,
        vocab_size: int = 256,
        num_workers: int = 0,
    ) -> None:
        super().__init__(num_workers=num_workers, collate=as_batch)
        self.check_arguments(
            num_samples=num_samples, num_val_samples=num_val_samples, context=context, vocab_size=vocab_size
        )
        self.num_samples = num_samples
        self.num_val_samples = num_val_samples
        self.context = context
        self.vocab_size = vocab_size

    @classmethod
    def check_arguments(cls, *, num_workers: int = 0, **sizes: int) -> None:
        check_at_least_one(**{f"data.{name}": value for name, value in sizes.items()})

    def setup(self, stage: str | None = None) -> None:
        make = {"context": self.context, "vocab_size": self.vocab_size}
        self.train_set = SyntheticTokenSamples(first=0, count=self.num_samples, **make)
        self.val_set = SyntheticTokenSamples(first=self.num_samples, count=self.num_val_samples, **make)
        self.test_set = self.val_set
