"""Names from outside reach no terminal, table or figure as anything but letters."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from miniature_files import cifar_parts, png, python2_batch, write_folder
from rich.console import Console

from protoseam.errors import DataError
from protoseam.lab.cli.main import main
from protoseam.lab.data.loading import load
from protoseam.lab.data.names import for_figures, for_markdown, for_terminal, printable
from protoseam.lab.engine import session
from protoseam.lab.engine.config import ConfigError, LiftConfig, OptimConfig, RunConfig
from protoseam.lab.engine.log import Progress
from protoseam.lab.engine.settings import from_dict, parse_yaml
from protoseam.lab.experiments import tables

BAD = ("\x1b]0;owned\x07", "two\nlines", "\x1b[2J", "left\u202eright", "\x9b31m", "long" * 51)


def _npz(folder: Path, name: str) -> Path:
    x, y = np.random.default_rng(0).integers(0, 256, (16, 4, 4, 1), dtype=np.uint8), np.arange(16) % 2
    np.savez(folder / "d.npz", x_train=x, y_train=y, x_test=x, y_test=y, classes=np.array(["a", name]))
    return folder / "d.npz"


def _array_folder(folder: Path, name: str) -> Path:
    x, y = np.random.default_rng(0).integers(0, 256, (8, 4, 4, 1), dtype=np.uint8), np.arange(8) % 2
    for part in ("train", "test"):
        np.save(folder / f"{part}_images.npy", x)
        np.save(folder / f"{part}_labels.npy", y)
    (folder / "classes.txt").write_text(f"a\n{name}\n", encoding="utf-8")
    return folder


def _cifar(folder: Path, name: str) -> Path:
    parts = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    files = {part: python2_batch(*arrays, "labels") for part, arrays in cifar_parts(parts).items()}
    files["batches.meta"] = pickle.dumps({"label_names": [name, *"bcdefghij"]}, protocol=2)
    return write_folder(folder / "cifar", files)


def _image_folder(folder: Path, name: str) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    files = {f"{label}/{i}.png": png(pixels) for label in ("a", name) for i in range(5)}
    return write_folder(folder / "images", files)


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("source", [_npz, _array_folder, _cifar, _image_folder])
def test_a_class_name_that_cannot_be_printed_is_refused(
    source: Callable[[Path, str], Path], name: str, tmp_path: Path
) -> None:
    if source is _array_folder and "\n" in name:
        pytest.skip("in such a file it is two names")
    with pytest.raises(DataError, match="cannot be printed on one line") as caught:
        load(str(source(tmp_path, name)), tmp_path / "root")
    assert for_terminal(str(caught.value)) == str(caught.value)


def test_no_command_prints_what_a_terminal_would_obey(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "verify", str(_npz(tmp_path, BAD[0]))]) == 1
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text('"\\e[31mkey": 1\n')
    assert main(["eval", str(tmp_path / "run")]) == 1
    assert main(["eval", str(tmp_path / "\x1b[2J")]) == 1
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err
    assert r"unknown setting '\x1b[31mkey'" in err


@pytest.mark.parametrize(
    "text", ['data: "\\e[2J"', 'model_options: {"a": ["\\e"]}', 'model_options: {"\\e": 1}']
)
def test_settings_are_printable(text: str) -> None:
    with pytest.raises(ConfigError, match=r"\\x1b"):
        from_dict(parse_yaml(text.encode()))


def test_a_run_is_called_by_its_name_whatever_rich_makes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr(
        "rich.console.Console", lambda **_: Console(file=shown, force_terminal=True, width=200, no_color=True)
    )
    with Progress("[link=http://x]run[/red]\x1b[2J", 0, 2):
        pass
    assert r"[link=http://x]run[/red]\x1b[2J" in shown.getvalue()


def test_names_in_an_audit_are_letters(tmp_path: Path) -> None:
    """Dollar signs begin a formula in matplotlib, and this one cannot be parsed; brackets are markup to rich."""
    config = RunConfig(
        data=str(_npz(tmp_path, "$\\frac{[bold]")),
        model="mlp",
        model_options={"hidden": [8]},
        epochs=2,
        validation=0.5,
        optim=OptimConfig(warmup_epochs=1),
        lift=LiftConfig(dim=2, rho_max=2.0),
        device="cpu",
    )
    session.train(config, tmp_path / "$run", quiet=True)
    assert main(["audit", str(tmp_path / "$run"), "--device=cpu"]) == 0
    assert list((tmp_path / "$run" / "audit").glob("*.svg"))


def test_a_name_may_have_two_hundred_characters() -> None:
    assert printable("é" * 200)
    assert not printable("é" * 201)


def test_each_language_gets_its_escapes() -> None:
    assert for_terminal("é\x1b[1m\n\udcff") == "é\\x1b[1m\n\\udcff"
    assert for_markdown("a|b\n![x](http://y) <b>") == r"a\|b \!\[x\](http://y) \<b\>"
    assert for_figures("$x$") == r"\$x\$"
    table = tables.Table("", ("a|b",), [["c|d"]])
    assert tables.markdown(table) == "| a\\|b |\n| --- |\n| c\\|d |\n"
    assert r"c\textasciicircum{}d\textasciitilde{}" in tables.latex(tables.Table("", ("a",), [["c^d~"]]))
