"""The short form of torture/fuzz.py: its targets on their seeds, and on seeded damage to them, without atheris."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from protoseam.errors import ProtoSeamError

TORTURE = Path(__file__).resolve().parents[2] / "torture"
NAMES = ("idx", "cifar-binary", "cifar-python", "zip", "npz", "images", "tar", "checkpoint", "config", "json")
TRIES = 60


def _imported(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TORTURE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def targets() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(TORTURE)  # it imports its neighbours
        yield _imported("fuzz_targets")


def damaged(seed: bytes, rng: random.Random) -> bytes:
    data = bytearray(seed)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(data) + 1)
        kind = rng.randrange(4)
        if kind == 0:
            data[place : place + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            del data[place : place + rng.randint(1, 40)]
        elif kind == 2:
            data[place:place] = rng.randbytes(rng.randint(1, 8))
        else:
            data[place : place + 4] = rng.choice(
                [b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff", b"\0\0\0\x80"]
            )
    return bytes(data)


def inputs(seeds: list[bytes]) -> Iterator[bytes]:
    rng = random.Random(0)
    yield from (b"", *seeds)
    yield from (damaged(seeds[i % len(seeds)], rng) for i in range(TRIES))


@pytest.mark.parametrize("name", NAMES)
def test_read_or_refused(name: str, targets: ModuleType, tmp_path: Path) -> None:
    target, seeds = targets.TARGETS[name]
    accepted = refused = 0
    for data in inputs(seeds()):
        try:
            targets.attempt(target, data, tmp_path / "box")
            accepted += 1
        except ProtoSeamError as error:
            assert str(error)  # noqa: PT017  any other exception fails the test
            refused += 1
    assert accepted >= 1
    assert refused >= 10
    assert not list(tmp_path.iterdir())


def test_the_driver_knows_every_target(targets: ModuleType) -> None:
    assert tuple(targets.TARGETS) == _imported("fuzz").NAMES == NAMES


def test_the_watch_sees_what_leaves_the_box(tmp_path: Path) -> None:
    watch = _imported("fuzz").Watch(tmp_path)
    watch.box.mkdir()
    watch.active = True
    watch.audit("open", (str(watch.box / "inside"), "w", 0o101))
    watch.audit("open", (str(tmp_path / "outside"), "r", 0))
    assert not watch.escaped
    watch.audit("open", (str(tmp_path / "outside"), "w", 0o101))
    watch.audit("os.mkdir", (str(watch.box / ".." / "outside"), 0o777, -1))
    watch.audit("subprocess.Popen", ("gs", ["gs"], None, None))
    assert [line.split(" ")[0] for line in watch.escaped] == ["open", "os.mkdir", "subprocess.Popen"]
    assert "atheris" not in sys.modules
