"""MNIST (LeCun, Cortes, Burges), Fashion-MNIST (Xiao, Rasul, Vollgraf 2017), KMNIST (Clanuwat et al. 2018).

Each has 60,000 training and 10,000 test images of 28 x 28 pixels. MNIST's digests are computed from the decompressed
files, so that recompressed files are accepted. The other digests are the published ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cupynet.backend.array import Array
from cupynet.core.errors import ConfigError
from cupynet.data.files import KnownFile, idx_path, parse_idx
from cupynet.data.sources.downloaded import Downloaded
from cupynet.data.sources.idx import IDX_NAMES


def known_files(*digests: str) -> tuple[KnownFile, ...]:
    """Return the files of training images and labels, then of test images and labels, with these digests."""
    names = IDX_NAMES.values()
    return tuple(KnownFile(f"{name}.gz", digest, 50_000_000) for name, digest in zip(names, digests, strict=True))


class IdxSet(Downloaded):
    """Base class of data sets in four IDX files: training images and labels, test images and labels."""

    image_shape = (28, 28, 1)
    classes = 10
    on_black = True

    def _read(self) -> tuple[Array, Array, Array, Array]:
        first, second, third, fourth = (parse_idx(self.path(file), self.read(file)) for file in self.files)
        return first, second, third, fourth


@dataclass(eq=False)
class MNIST(IdxSet):
    """MNIST: handwritten digits, in `<folder>/mnist`. Uncompressed files are accepted too (see `idx_path`).

    Args:
        fallback: if the files are missing and cannot be downloaded, "synthetic" loads `Synthetic` digits with a
            warning, and None raises DataError. "auto" means "synthetic", or None if `folder` or CUPYNET_DATA is set.
        other arguments: see `Downloaded`.
    """

    name = "mnist"
    centered = True
    files = known_files(
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    )
    mirrors = (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
        "https://raw.githubusercontent.com/fgnt/mnist/master/",
    )

    fallback: str | None = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fallback not in ("auto", "synthetic", None):
            reason = "must be 'auto', 'synthetic', or null for an error"
            raise ConfigError(reason, "fallback", repr(self.fallback))

    def path(self, file: KnownFile) -> Path:
        return idx_path(self.place, file.name.removesuffix(".gz"))

    @property
    def may_stand_in(self) -> bool:
        return self.fallback == "synthetic" or (self.fallback == "auto" and not self.named)


class FashionMNIST(IdxSet):
    """Fashion-MNIST: clothes, shoes and bags, in `<folder>/fashion_mnist`. See `Downloaded`."""

    name = "fashion_mnist"
    class_names = (
        *("T-shirt/top", "trouser", "pullover", "dress", "coat"),
        *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
    )
    files = known_files(
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    )
    mirrors = (
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    )


class KMNIST(IdxSet):
    """KMNIST: cursive Japanese characters, in `<folder>/kmnist`. See `Downloaded`."""

    name = "kmnist"
    class_names = ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo")
    files = known_files(
        "51467d22d8cc72929e2a028a0428f2086b092bb31cfb79c69cc0a90ce135fde4",
        "e38f9ebcd0f3ebcdec7fc8eabdcdaef93bb0df8ea12bee65224341c8183d8e17",
        "edd7a857845ad6bb1d0ba43fe7e794d164fe2dce499a1694695a792adfac43c5",
        "20bb9a0ef54c7db3efc55a92eef5582c109615df22683c380526788f98e42a1c",
    )
    mirrors = ("http://codh.rois.ac.jp/kmnist/dataset/kmnist/",)
