"""The data sets known by name: their files, where those are published, and their checksums.

Sizes and SHA-256 of the CIFAR binary archives, MNIST, Fashion-MNIST and TinyImageNet are those of TensorFlow Datasets
(tensorflow/datasets, tensorflow_datasets/url_checksums/*.txt). SHA-256 of the CIFAR python archives are Keras's
`file_hash` (keras-team/keras, keras/src/datasets/{cifar10,cifar100}.py); their sizes are what the host reports.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from protoseam.errors import DataError

ROOT_VARIABLE = "PROTOSEAM_DATA"


@dataclass(frozen=True)
class SourceFile:
    """One published file. Without a `sha256` it is downloaded only if the user supplies one."""

    name: str
    url: str
    size: int | None
    sha256: str | None


@dataclass(frozen=True)
class Source:
    """One form of a data set: the reader's name, and the files it needs, all of them."""

    format: str
    files: tuple[SourceFile, ...]
    folder: str | None = None  # the folder an archive unpacks to; reading that works as well

    @property
    def download_size(self) -> int:
        return sum(file.size or 0 for file in self.files)


@dataclass(frozen=True)
class Entry:
    """A data set known by name. The first source is the one that is downloaded."""

    name: str
    title: str
    num_classes: int
    classes: tuple[str, ...]  # names in label order; empty where the files themselves hold the names
    train_size: int
    test_size: int
    sample_shape: tuple[int, int, int]
    sources: tuple[Source, ...] = ()
    # Folders under the root that may hold the files, the first being where downloads go. MNIST and
    # Fashion-MNIST share their file names, so neither is ever looked for in the root itself.
    folders: tuple[str, ...] = (".",)

    @property
    def embedded(self) -> bool:
        return not self.sources


def default_root() -> Path:
    """Return $PROTOSEAM_DATA, or ~/.cache/protoseam/data."""
    given = os.environ.get(ROOT_VARIABLE)
    return Path(given).expanduser() if given else Path.home() / ".cache" / "protoseam" / "data"


def find(name: str) -> Entry | None:
    """Return the entry of that name, ignoring case, hyphens and underscores, or None."""
    return next((item for item in CATALOG.values() if _plain(item.name) == _plain(name)), None)


def entry(name: str) -> Entry:
    found = find(name)
    if found is None:
        raise DataError(f"there is no data set called {name!r}; the names are {', '.join(CATALOG)}")
    return found


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


_TORONTO = "https://www.cs.toronto.edu/~kriz/"
_DIGITS = tuple("0123456789")
_FASHION_NAMES = "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot"
_CIFAR10_NAMES = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR100_NAMES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""


# Each published file: its name, bytes and SHA-256.
_MNIST_FILES = """
train-images-idx3-ubyte.gz 9912422 440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609
train-labels-idx1-ubyte.gz 28881 3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c
t10k-images-idx3-ubyte.gz 1648877 8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6
t10k-labels-idx1-ubyte.gz 4542 f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6
"""
_FASHION_FILES = """
train-images-idx3-ubyte.gz 26421880 3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84
train-labels-idx1-ubyte.gz 29515 a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845
t10k-images-idx3-ubyte.gz 4422102 346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073
t10k-labels-idx1-ubyte.gz 5148 67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5
"""
# The binary form comes first, so it is the one downloaded: it holds the same pixels and no pickle.
_CIFAR10_FILES = """
cifar-10-binary.tar.gz 170052171 c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd
cifar-10-python.tar.gz 170498071 6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce
"""
_CIFAR100_FILES = """
cifar-100-binary.tar.gz 168513733 58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec
cifar-100-python.tar.gz 169001437 85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7
"""
_TINY_FILE = """
tiny-imagenet-200.zip 248100043 6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821
"""


def _files(base: str, listed: str) -> tuple[SourceFile, ...]:
    rows = (line.split() for line in listed.split("\n") if line)
    return tuple(SourceFile(name, base + name, int(size), sha256) for name, size, sha256 in rows)


def _archives(base: str, listed: str, *forms: tuple[str, str]) -> tuple[Source, ...]:
    """Sources of one file each, given the format and the folder of each."""
    pairs = zip(_files(base, listed), forms, strict=True)
    return tuple(Source(form, (file,), folder) for file, (form, folder) in pairs)


# Google's copy of the files that were at yann.lecun.com, which serves no https; the bucket of Fashion-MNIST's authors
# by its TLS address, because its website address serves no https.
_MNIST = Source("idx", _files("https://storage.googleapis.com/cvdf-datasets/mnist/", _MNIST_FILES))
_FASHION = Source("idx", _files("https://fashion-mnist.s3.eu-central-1.amazonaws.com/", _FASHION_FILES))
_CIFAR10_FORMS = ("cifar10-binary", "cifar-10-batches-bin"), ("cifar10-python", "cifar-10-batches-py")
_CIFAR100_FORMS = ("cifar100-binary", "cifar-100-binary"), ("cifar100-python", "cifar-100-python")
_TINY_TITLE = "TinyImageNet; test is its validation set, as its own test set has no labels"

CATALOG: dict[str, Entry] = {item.name: item for item in (
    Entry("digits", "8×8 digits that scikit-learn ships", 10, _DIGITS, 1438, 359, (8, 8, 1)),
    Entry("mnist", "MNIST", 10, _DIGITS, 60_000, 10_000, (28, 28, 1),
          (_MNIST,), ("mnist", "MNIST")),
    Entry("fashion-mnist", "Fashion-MNIST", 10, tuple(_FASHION_NAMES.split(",")), 60_000, 10_000, (28, 28, 1),
          (_FASHION,), ("fashion-mnist", "FashionMNIST")),
    Entry("cifar10", "CIFAR-10", 10, tuple(_CIFAR10_NAMES.split()), 50_000, 10_000, (32, 32, 3),
          _archives(_TORONTO, _CIFAR10_FILES, *_CIFAR10_FORMS), (".", "cifar10")),
    Entry("cifar100", "CIFAR-100, fine labels", 100, tuple(_CIFAR100_NAMES.split()), 50_000, 10_000, (32, 32, 3),
          _archives(_TORONTO, _CIFAR100_FILES, *_CIFAR100_FORMS), (".", "cifar100")),
    # the WordNet ids are read from the set's wnids.txt
    Entry("tinyimagenet", _TINY_TITLE, 200, (), 100_000, 10_000, (64, 64, 3),
          _archives("https://cs231n.stanford.edu/", _TINY_FILE, ("tinyimagenet", "tiny-imagenet-200")),
          (".", "tinyimagenet")),
)}  # fmt: skip
