"""MNIST, Fashion-MNIST, CIFAR-10, CIFAR-100 and folders of images, over torchvision (imported when needed)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import Dataset, Subset

from shardwise.data.splits import (
    SplitDataModule,
    as_batch,
    check_at_least_one,
    check_fraction,
    stratified_split,
)
from shardwise.errors import ConfigError

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
EVAL_RESIZE = 256 / 224
"""Evaluation resizes to this times the crop, as in A. Krizhevsky et al., 2012, and everywhere since."""


def load_image(path: str) -> Any:
    """The image at `path` as RGB; a `ConfigError` that names the file where it is none."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (UnidentifiedImageError, OSError) as error:
        raise ConfigError(f"{path} is not a readable image ({error}): repair or remove it") from error


def class_folders(path: Path) -> list[str]:
    """The classes of a folder of images: its folders, sorted."""
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


class Images(Dataset):
    """Images (N, C, H, W) uint8 in memory, normalised when they are taken; `augment` crops and flips each before."""

    def __init__(
        self,
        images: torch.Tensor,
        labels: torch.Tensor,
        *,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        augment: bool = False,
    ) -> None:
        self.images, self.labels = images, labels
        self.mean, self.std = torch.tensor(mean)[:, None, None], torch.tensor(std)[:, None, None]
        self.deterministic = not augment
        self.transform: Callable[[torch.Tensor], torch.Tensor] | None = None
        if augment:
            from torchvision.transforms import v2

            size = images.shape[-1]
            # the usual recipe for CIFAR: C.-Y. Lee et al., "Deeply-Supervised Nets", 2015
            self.transform = v2.Compose([v2.RandomCrop(size, padding=size // 8), v2.RandomHorizontalFlip()])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = self.images[int(index)]
        if self.transform is not None:
            image = self.transform(image)
        return self._normalise(image), self.labels[int(index)]

    def __getitems__(self, indices: list[int]) -> Any:
        if self.transform is not None:
            return [self[index] for index in indices]
        rows = torch.tensor(indices)
        return self._normalise(self.images[rows]), self.labels[rows]

    def _normalise(self, images: torch.Tensor) -> torch.Tensor:
        return (images.float() / 255 - self.mean) / self.std


class SmallImages(SplitDataModule):
    """A torchvision dataset that fits in memory. Validation takes `val_fraction` of the training set, stratified.

    Args:
        path: the folder that holds the data, in torchvision's own layout.
        download: fetch what is missing. Without it, missing data are an error.
        augment: random crops and flips of the training images.
        val_fraction: part of the training set kept for validation, the same in every run; 0 validates on the test set.
        num_workers: processes that load samples, per rank.
    """

    dataset_name: ClassVar[str]
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]
    files: ClassVar[str]
    """A glob for what is there once the data are, relative to `path`."""
    num_classes: int
    in_channels: int
    image_size: int

    def __init__(
        self,
        *,
        path: str = "data",
        download: bool = True,
        augment: bool = False,
        val_fraction: float = 0.1,
        num_workers: int = 0,
    ) -> None:
        super().__init__(num_workers=num_workers, collate=as_batch)
        self.check_arguments(path=path, download=download, val_fraction=val_fraction)
        self.path = path
        self.download = download
        self.augment = augment
        self.val_fraction = val_fraction

    @classmethod
    def check_arguments(cls, *, path: str = "data", download: bool = True, val_fraction: float = 0.1, **_: Any) -> None:
        check_fraction(val_fraction, name="data.val_fraction")
        if not download and not any(Path(path).glob(cls.files)):
            raise cls._missing(path, "nothing there")

    def prepare_data(self) -> None:
        if self.download:
            try:
                for train in (True, False):
                    self._dataset(train=train, download=True)
            except (RuntimeError, ValueError, OSError) as error:
                reason = " ".join(str(error).split())[:200]
                raise ConfigError(
                    f"{self.dataset_name} could not be downloaded to, or read from, {Path(self.path).absolute()}"
                    f" ({reason}): check the network, remove what is broken there, or put the files there and set"
                    " data.download=false"
                ) from error

    def setup(self, stage: str | None = None) -> None:
        if self.train_set is not None:
            return
        try:
            train_images, train_labels = self._tensors(self._dataset(train=True))
            test_images, test_labels = self._tensors(self._dataset(train=False))
        except (RuntimeError, ValueError, OSError) as error:
            raise self._missing(self.path, str(error)) from error
        train, val = stratified_split(train_labels, fraction=self.val_fraction)
        look: dict[str, Any] = {"mean": self.mean, "std": self.std}
        self.train_set = Images(train_images[train], train_labels[train], augment=self.augment, **look)
        self.test_set = Images(test_images, test_labels, **look)
        self.val_set = Images(train_images[val], train_labels[val], **look) if len(val) else self.test_set

    @classmethod
    def _missing(cls, path: str, reason: str) -> ConfigError:
        return ConfigError(
            f"{cls.dataset_name} is not in {Path(path).absolute()} ({' '.join(reason.split())[:200]}): set"
            f" data.download=true, or data.path to the folder that holds {cls.files.split('/')[0]}"
        )

    def _dataset(self, *, train: bool, download: bool = False) -> Any:
        from torchvision import datasets

        return getattr(datasets, self.dataset_name)(self.path, train=train, download=download)

    @staticmethod
    def _tensors(dataset: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Images (N, C, H, W) uint8 and labels (N,) int64, from either of torchvision's ways to keep them."""
        images = torch.as_tensor(np.asarray(dataset.data))
        images = images[:, None] if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()
        return images, torch.as_tensor(dataset.targets, dtype=torch.int64)


class MNIST(SmallImages):
    """Handwritten digits, 28 x 28, 60,000 and 10,000 (Y. LeCun et al., 1998)."""

    dataset_name = "MNIST"
    files = "MNIST/raw/train-images-idx3-ubyte"
    mean, std = (0.1307,), (0.3081,)
    num_classes, in_channels, image_size = 10, 1, 28


class FashionMNIST(MNIST):
    """Clothes in MNIST's format (H. Xiao et al., 2017)."""

    dataset_name = "FashionMNIST"
    files = "FashionMNIST/raw/train-images-idx3-ubyte"
    mean, std = (0.2860,), (0.3530,)


class CIFAR10(SmallImages):
    """Photographs, 3 x 32 x 32, 50,000 and 10,000, ten classes (A. Krizhevsky, 2009)."""

    dataset_name = "CIFAR10"
    files = "cifar-10-batches-py/data_batch_1"
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    num_classes, in_channels, image_size = 10, 3, 32

    def __init__(
        self,
        *,
        path: str = "data",
        download: bool = True,
        augment: bool = True,
        val_fraction: float = 0.1,
        num_workers: int = 2,
    ) -> None:
        super().__init__(
            path=path, download=download, augment=augment, val_fraction=val_fraction, num_workers=num_workers
        )


class CIFAR100(CIFAR10):
    """CIFAR-10's sibling with a hundred classes."""

    dataset_name = "CIFAR100"
    files = "cifar-100-python/train"
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    num_classes = 100


class ImageFolder(SplitDataModule):
    """Images in a folder per class: `<path>/train/<class>/*` with `val` and `test` beside it, or `<path>/<class>/*`.

    Without `val`, `val_fraction` of the training images is kept for validation, stratified and the same in every run.
    Without `test`, the validation images are the test set.

    Args:
        path: the folder.
        image_size: pixels along each side after cropping.
        augment: random resized crops and flips in training; otherwise the centre crop of evaluation.
        val_fraction: used if there is no folder `val`.
        num_workers: processes that load samples, per rank.
    """

    in_channels = 3

    def __init__(
        self,
        *,
        path: str,
        image_size: int = 224,
        augment: bool = True,
        val_fraction: float = 0.1,
        num_workers: int = 2,
    ) -> None:
        super().__init__(num_workers=num_workers)
        self.check_arguments(path=path, image_size=image_size, val_fraction=val_fraction)
        self.path = path
        self.image_size = image_size
        self.augment = augment
        self.val_fraction = val_fraction
        self.num_classes = len(class_folders(self._train_folder(path)))

    @classmethod
    def check_arguments(cls, *, path: str, image_size: int = 224, val_fraction: float = 0.1, **_: Any) -> None:
        check_at_least_one(**{"data.image_size": image_size})
        root = Path(path)
        if not root.is_dir():
            raise ConfigError(f"data.path={path} is not a folder: set it to a folder that has a folder per class")
        train = cls._train_folder(path)
        classes = class_folders(train)
        if not classes:
            raise ConfigError(f"{train} has no folders in it: put the images of each class into a folder of their own")
        for part in ("val", "test"):
            if train != root and (root / part).is_dir() and class_folders(root / part) != classes:
                raise ConfigError(
                    f"{root / part} has the classes {class_folders(root / part)[:5]} but {train} has {classes[:5]}"
                    " (the first five of each): they have to be the same"
                )
        has_val = train != root and (root / "val").is_dir()
        check_fraction(val_fraction, name="data.val_fraction", zero=has_val)

    def setup(self, stage: str | None = None) -> None:
        if self.train_set is not None:
            return
        from torchvision.transforms import v2

        to_tensor = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(IMAGENET_MEAN, IMAGENET_STD)]
        centre = v2.Compose(
            [v2.Resize(round(self.image_size * EVAL_RESIZE)), v2.CenterCrop(self.image_size), *to_tensor]
        )
        crop = v2.Compose([v2.RandomResizedCrop(self.image_size), v2.RandomHorizontalFlip(), *to_tensor])
        root, folder = Path(self.path), self._train_folder(self.path)
        train: Any = self._images(folder, transform=crop if self.augment else centre, deterministic=not self.augment)
        split = folder != root
        if split and (root / "val").is_dir():
            self.train_set, self.val_set = train, self._images(root / "val", transform=centre)
        else:
            kept, held_out = stratified_split(train.targets, fraction=self.val_fraction)
            if not len(held_out):
                raise ConfigError(
                    f"data.val_fraction={self.val_fraction} of the {len(train)} images in {folder} leaves none for"
                    " validation: raise it, or add a folder val"
                )
            self.train_set = Subset(train, kept.tolist())
            self.val_set = Subset(self._images(folder, transform=centre), held_out.tolist())
        has_test = split and (root / "test").is_dir()
        self.test_set = self._images(root / "test", transform=centre) if has_test else self.val_set

    @staticmethod
    def _train_folder(path: str) -> Path:
        root = Path(path)
        return root / "train" if (root / "train").is_dir() else root

    @staticmethod
    def _images(folder: Path, *, transform: Callable[[Any], Any], deterministic: bool = True) -> Any:
        from torchvision import datasets

        try:
            images = datasets.ImageFolder(str(folder), transform=transform, loader=load_image)
        except FileNotFoundError as error:
            raise ConfigError(" ".join(str(error).split()) + f" (in {folder}): fill or remove those folders") from error
        images.deterministic = deterministic
        return images
