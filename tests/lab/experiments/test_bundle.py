"""A study that is interrupted, packed, unpacked elsewhere and resumed ends like one that was never interrupted."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from protoseam.errors import DataError, ProtoSeamError
from protoseam.lab.cli.main import main
from protoseam.lab.engine.config import ConfigError, LiftConfig, OptimConfig, RunConfig
from protoseam.lab.engine.rundir import RunDirectory, RunLockedError
from protoseam.lab.engine.session import Interrupted
from protoseam.lab.experiments import bundle, study

CONFIG = RunConfig(
    data="digits",
    model="mlp",
    model_options={"hidden": [16]},
    epochs=3,
    augment="none",
    optim=OptimConfig(lr=0.02, warmup_epochs=1),
    lift=LiftConfig(dim=4, rho_max=2.0),
    device="cpu",
)
PLAN = [(variant, dataclasses.replace(CONFIG, variant=variant)) for variant in ("baseline", "protoseam")]


@pytest.fixture
def halfway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A study whose first run is finished and whose second was interrupted after two of three epochs."""
    write = RunDirectory.append_metrics

    def interrupt(self: RunDirectory, row: dict[str, Any]) -> None:
        write(self, row)
        if self.path.name == "protoseam" and row["epoch"] == 2:
            self.append_metrics = stop  # type: ignore[method-assign]

    def stop(row: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RunDirectory, "append_metrics", interrupt)
    with pytest.raises(Interrupted):
        study.run_study(PLAN, tmp_path / "here", quiet=True)
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "here").glob("unfinished/*/checkpoints/*")] == ["epoch-000002"]
    return tmp_path / "here"


def test_a_run_goes_on_elsewhere_as_if_it_had_never_stopped(
    halfway: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts, there = tmp_path / "parts", tmp_path / "there"
    before = RunDirectory(halfway / "unfinished" / "protoseam").read_metrics()[:2]
    assert main(["bundle", "pack", str(halfway), str(parts), "--part-mib", "0.004"]) == 0
    sizes = [path.stat().st_size for path in parts.glob("part-*")]
    assert len(sizes) > 2
    assert max(sizes) <= 0.004 * 2**20
    assert main(["bundle", "unpack", str(parts), str(there)]) == 0
    assert f"added to {there}: baseline, protoseam" in capsys.readouterr().out
    assert study.run_study(PLAN, there, quiet=True)
    assert study.run_study(PLAN, tmp_path / "whole", quiet=True)
    moved, whole = (study.read_study(folder) for folder in (there, tmp_path / "whole"))
    assert moved["protoseam"]["metrics"][:2] == before  # seconds and all: these epochs were not trained again
    for name, row in whole.items():
        assert moved[name]["test_accuracy"] == row["test_accuracy"]
        assert [epoch["loss"] for epoch in moved[name]["metrics"]] == [
            epoch["loss"] for epoch in row["metrics"]
        ]
        assert moved[name]["cost"]["seconds"] > 0
    assert bundle.unpack(parts, there).kept == ["baseline", "protoseam"]  # what is further on stays


def test_a_damaged_or_missing_part_adds_nothing(halfway: Path, tmp_path: Path) -> None:
    *parts, _ = bundle.pack(halfway, tmp_path / "parts", part_bytes=2**12)
    data = bytearray(parts[1].read_bytes())
    data[100] ^= 1
    parts[1].write_bytes(data)
    with pytest.raises(DataError, match=r"part-001.*SHA-256"):
        bundle.unpack(tmp_path / "parts", tmp_path / "there")
    parts[1].unlink()
    with pytest.raises(DataError, match="part-001"):
        bundle.unpack(tmp_path / "parts", tmp_path / "there")
    assert not list((tmp_path / "there").iterdir())


def test_a_mistyped_folder_of_parts_makes_no_study(tmp_path: Path) -> None:
    with pytest.raises(ProtoSeamError, match="manifest"):
        bundle.unpack(tmp_path / "mistyped", tmp_path / "study")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["../out.json", "unfinished/run/lock", "notes.txt", "link.json", "bad.json"])
def test_an_archive_of_anything_but_a_study_is_refused(name: str, tmp_path: Path) -> None:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        member = tarfile.TarInfo(name)
        if name == "link.json":
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/hostname"
        archive.addfile(member)
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "part-000").write_bytes(content.getvalue())
    digest = hashlib.sha256(content.getvalue()).hexdigest()
    manifest = {"format": 1, "parts": [{"size": len(content.getvalue()), "sha256": digest}]}
    (tmp_path / "parts" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ProtoSeamError, match=name.removeprefix("../")):
        bundle.unpack(tmp_path / "parts", tmp_path / "there")
    assert not list((tmp_path / "there").iterdir())


def test_runs_under_way_and_runs_with_other_settings_are_left_alone(halfway: Path, tmp_path: Path) -> None:
    with RunDirectory.claim(halfway / "unfinished" / "protoseam"), pytest.raises(RunLockedError):
        bundle.pack(halfway, tmp_path / "parts")
    bundle.pack(halfway, tmp_path / "parts")
    with pytest.raises(ConfigError, match="parts is not empty"):
        bundle.pack(halfway, tmp_path / "parts")
    other = dataclasses.replace(PLAN[1][1], epochs=9)
    RunDirectory.create(tmp_path / "there" / "unfinished" / "protoseam", other).close()
    with pytest.raises(ConfigError, match="epochs: 9 there, 3 here"):
        bundle.unpack(tmp_path / "parts", tmp_path / "there")
