"""Checkpoints are whole or absent, and damage is noticed."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from protoseam.lab.engine import checkpoint, rundir
from protoseam.lab.engine.files import StorageError


def _state(value: int) -> dict[str, object]:
    return {"weights": torch.full((1000,), float(value)), "epoch": value, "nested": {"rng": torch.arange(5)}}


def test_the_newest_is_read_and_old_ones_go(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    for epoch in (1, 2, 10):
        checkpoint.save(tmp_path, epoch, _state(epoch))
    found = checkpoint.latest(tmp_path)
    assert found is not None
    epoch, state = found
    assert epoch == state["epoch"] == 10
    assert torch.equal(state["weights"], torch.full((1000,), 10.0))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["epoch-000002", "epoch-000010"]


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: _flip(folder / "state.pt", 2000),
        lambda folder: _flip(folder / "manifest.json", 30),
        lambda folder: (folder / "state.pt").write_bytes((folder / "state.pt").read_bytes()[:-7]),
        lambda folder: (folder / "state.pt").unlink(),
        lambda folder: (folder / "manifest.json").unlink(),
        lambda folder: (folder / "manifest.json").write_text("{}"),
    ],
    ids=["flip", "manifest flip", "cut", "no state", "no manifest", "empty manifest"],
)
def test_damage_is_noticed_and_the_one_before_is_used(tmp_path: Path, damage: object) -> None:
    checkpoint.save(tmp_path, 1, _state(1))
    newest = checkpoint.save(tmp_path, 2, _state(2))
    damage(newest)  # type: ignore[operator]
    with pytest.warns(checkpoint.CheckpointWarning, match="epoch-000002 is damaged"):
        found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found[0] == 1
    damage(tmp_path / "epoch-000001")  # type: ignore[operator]
    with (
        pytest.warns(checkpoint.CheckpointWarning),
        pytest.raises(checkpoint.CheckpointError, match="every checkpoint"),
    ):
        checkpoint.latest(tmp_path)


def test_every_single_byte_matters(tmp_path: Path) -> None:
    whole = checkpoint.save(tmp_path / "a", 3, {"w": torch.arange(4.0)})
    data = (whole / "state.pt").read_bytes()
    for at in range(0, len(data), 37):
        _flip(whole / "state.pt", at)
        with pytest.warns(checkpoint.CheckpointWarning), pytest.raises(checkpoint.CheckpointError):
            checkpoint.latest(tmp_path / "a")
        (whole / "state.pt").write_bytes(data)
    assert checkpoint.latest(tmp_path / "a") is not None


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "owned"),)

    checkpoint.save(tmp_path / "c", 1, {"x": Evil()})
    with pytest.warns(checkpoint.CheckpointWarning), pytest.raises(checkpoint.CheckpointError):
        checkpoint.latest(tmp_path / "c")
    assert not (tmp_path / "owned").exists()


def test_a_full_disk_says_so_and_keeps_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path, 1, _state(1))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint.os, "fsync", full)
    with pytest.raises(StorageError, match="disk is full"):
        checkpoint.save(tmp_path, 2, _state(2))
    monkeypatch.undo()
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found[0] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["epoch-000001"]


def test_killed_while_saving_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    script = tmp_path / "save.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys, torch
            from pathlib import Path
            from protoseam.lab.engine import checkpoint
            torch.set_num_threads(1)
            state = {"w": torch.zeros(200_000)}
            checkpoint.save(Path(sys.argv[1]), 0, state)
            print("ready", flush=True)
            for epoch in range(1, 10_000):
                state["w"].fill_(epoch)
                checkpoint.save(Path(sys.argv[1]), epoch, state)
            """
        )
    )
    generator = torch.Generator().manual_seed(0)
    for kill in range(4):
        folder = tmp_path / f"run{kill}"
        process = subprocess.Popen([sys.executable, str(script), str(folder)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        deadline = time.monotonic() + 0.05 + 0.3 * float(torch.rand((), generator=generator))
        while time.monotonic() < deadline:
            pass
        process.kill()
        process.wait()
        process.stdout.close()
        found = checkpoint.latest(folder)  # any warning of damage would be an error here
        assert found is not None
        assert torch.equal(found[1]["w"], torch.full((200_000,), float(found[0])))


def test_the_commit_says_whether_the_sources_are_its_own(tmp_path: Path) -> None:
    assert rundir._commit(tmp_path) is None  # an installed package has no repository
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("1\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *command], check=True)
    clean = rundir._commit(tmp_path)
    assert clean is not None
    assert len(clean) == 12
    (tmp_path / "notes.txt").write_text("not a source\n")
    assert rundir._commit(tmp_path) == clean
    (tmp_path / "src" / "a.py").write_text("2\n")
    assert rundir._commit(tmp_path) == f"{clean}-dirty"
