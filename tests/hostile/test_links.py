"""A stranger's run, study or cache may hold links: nothing is written, emptied, removed or renamed through them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from protoseam.errors import DataWarning
from protoseam.lab.cli.main import main
from protoseam.lab.data import cache
from protoseam.lab.data.catalog import SourceFile
from protoseam.lab.data.dataset import ArrayDataset
from protoseam.lab.data.download import download
from protoseam.lab.data.links import LinkError, open_in_place
from protoseam.lab.engine import checkpoint, session
from protoseam.lab.engine.config import LiftConfig, OptimConfig, RunConfig
from protoseam.lab.engine.export import export
from protoseam.lab.engine.files import write_atomically
from protoseam.lab.experiments.study import run_study

SMALL = RunConfig(
    model="mlp",
    model_options={"hidden": [8]},
    epochs=2,
    optim=OptimConfig(warmup_epochs=1),
    lift=LiftConfig(dim=4, rho_max=2.0),
    device="cpu",
    checkpoint_every=1,
)
ENTRIES = (
    "lock",
    "config.yaml",
    "env.json",
    "data.json",
    "metrics.jsonl",
    "summary.json",
    "model.safetensors",
)
FOLDERS = ("checkpoints", "checkpoints/epoch-000002")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "finished"
    session.train(SMALL, run, quiet=True)
    return run


def victims(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"" for p in folder.rglob("*")}


@pytest.mark.parametrize("there", [True, False], ids=["there", "missing"])
@pytest.mark.parametrize("entry", [*ENTRIES, *FOLDERS, "checkpoints/epoch-000002/state.pt"])
@pytest.mark.parametrize("done", [True, False], ids=["finished", "stopped"])
def test_a_run_with_a_link_is_not_gone_on_with(
    entry: str, there: bool, done: bool, finished: Path, tmp_path: Path
) -> None:
    run, victim = tmp_path / "run", tmp_path / "elsewhere" / "victim"
    shutil.copytree(finished, run)
    victim.parent.mkdir()
    if not done and entry not in ("summary.json", "model.safetensors"):
        (run / "summary.json").unlink()
    if there:
        shutil.move(run / entry, victim)
    elif (run / entry).is_dir():
        shutil.rmtree(run / entry)
    else:
        (run / entry).unlink()
    (run / entry).symlink_to(victim)
    before = victims(victim.parent)
    if entry == "config.yaml" and not there:
        with pytest.raises(Exception, match=r"no config\.yaml"):
            session.resume(run, quiet=True)
    else:
        with pytest.raises(LinkError, match=f"{run / entry} is a link to {victim}"):
            session.resume(run, quiet=True)
    with pytest.raises(LinkError, match="is a link"):
        session.train(SMALL, run, quiet=True)
    assert victims(victim.parent) == before


def test_a_new_run_writes_through_no_link(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "run" / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(LinkError, match="lock is a link"):
        session.train(SMALL, tmp_path / "run", quiet=True)
    assert (tmp_path / "victim").read_text() == "mine"


def test_the_folder_the_user_names_may_be_a_link(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    assert session.resume(tmp_path / "link", quiet=True)["epochs"] == 2


def test_a_checkpoint_is_saved_in_no_linked_folder(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "checkpoints").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LinkError, match="checkpoints is a link"):
        checkpoint.save(tmp_path / "checkpoints", 1, {})
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "epoch-000001").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LinkError, match="epoch-000001 is a link"):
        checkpoint.save(tmp_path / "real", 1, {})
    assert not list((tmp_path / "elsewhere").iterdir())


def test_no_file_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    for write in (lambda path: write_atomically(path, b"theirs"), open_in_place):
        with pytest.raises(LinkError, match="link is a link"):
            write(tmp_path / "link")
    assert (tmp_path / "victim").read_text() == "mine"


def test_a_file_with_two_names_and_a_pipe_are_not_written_in_place(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    os.link(tmp_path / "victim", tmp_path / "second")
    with pytest.raises(LinkError, match="hard link"):
        open_in_place(tmp_path / "second")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(LinkError, match="not a plain file"):
        open_in_place(tmp_path / "pipe")


@pytest.mark.parametrize("entry", ["a.json", "unfinished", "unfinished/a", "unfinished/a/lock", "report"])
def test_a_study_with_a_link_is_refused(entry: str, tmp_path: Path) -> None:
    study, elsewhere = tmp_path / "study", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("mine")
    (study / entry).parent.mkdir(parents=True)
    (study / entry).symlink_to(elsewhere / "file" if "." in entry or "lock" in entry else elsewhere)
    with pytest.raises(LinkError, match="is a link"):
        run_study([("a", SMALL)], study, quiet=True)
    assert main(["reproduce", "table1", "--quick", "--table-only", f"--out={study}"]) == 1
    assert victims(elsewhere) == {"file": b"mine"}


@pytest.mark.parametrize("entry", ["sweep.db", "baseline", "baseline/trials.md"])
def test_a_sweep_with_a_link_is_refused(
    entry: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, victim = tmp_path / "sweep", tmp_path / "elsewhere"
    (out / entry).parent.mkdir(parents=True)
    (out / entry).symlink_to(victim)
    assert main(["sweep", "--variant=baseline", "--trials=1", f"--out={out}"]) == 1
    assert f"{out / entry} is a link" in capsys.readouterr().err
    assert not victim.exists()


def test_runs_of_several_seeds_go_into_no_linked_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "baseline-1").symlink_to(tmp_path / "elsewhere")
    words = ["--variants=baseline", "--seeds=1,2", f"--out={tmp_path / 'runs'}"]
    assert main(["train", *words]) == 1
    assert "baseline-1 is a link" in capsys.readouterr().err
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_hub_folder_is_written_through_no_link(finished: Path, tmp_path: Path) -> None:
    run, victim = tmp_path / "run", tmp_path / "victim"
    shutil.copytree(finished, run)
    victim.mkdir()
    (run / "hub").symlink_to(victim)
    with pytest.raises(LinkError, match="hub is a link"):
        export(run, to="hub")
    assert not list(victim.iterdir())
    mine = tmp_path / "mine"
    mine.symlink_to(victim)
    export(run, mine, to="hub")  # the user's own may be one
    assert (victim / "config.json").exists()


@pytest.mark.parametrize("entry", ["audit", "audit/audit.json"])
def test_an_audit_is_written_through_no_link(
    entry: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    shutil.copytree(finished, run)
    (run / entry).parent.mkdir(exist_ok=True)
    elsewhere.mkdir()
    (run / entry).symlink_to(elsewhere / "new" if "." in entry else elsewhere)
    assert main(["audit", str(run), "--device=cpu"]) == 1
    assert f"{run / entry} is a link" in capsys.readouterr().err
    assert not list(elsewhere.iterdir())


def _decoded() -> ArrayDataset:
    images = np.zeros((2, 2, 2, 1), dtype=np.uint8)
    return ArrayDataset("x", images, np.array([0, 1]), images, np.array([0, 1]), ("a", "b"))


@pytest.mark.parametrize("link", [lambda folder: folder.parent, lambda folder: folder])
def test_the_cache_writes_through_no_link(link: Callable[[Path], Path], tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder = cache.folder_of(root, "x", [("a", 1, 1)])
    link(folder).parent.mkdir(parents=True)
    link(folder).symlink_to(elsewhere)
    with pytest.warns(DataWarning, match="is a link"):
        cache.cached(root, "x", [("a", 1, 1)], _decoded)
    assert not list(elsewhere.iterdir())


def test_a_download_is_not_appended_to_what_a_link_leads_to(tmp_path: Path) -> None:
    (tmp_path / "file.part").symlink_to(tmp_path / "victim")
    file = SourceFile("file", "https://localhost/file", size=4, sha256="0" * 64)
    with pytest.raises(LinkError, match=r"file.part is a link"):
        download(file, tmp_path)
    assert not (tmp_path / "victim").exists()
