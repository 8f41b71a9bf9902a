"""A small file of a stranger takes little memory, whatever it says."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from protoseam.errors import ProtoSeamError
from protoseam.lab.engine import checkpoint, session
from protoseam.lab.engine.config import LiftConfig, OptimConfig, RunConfig, to_dict
from protoseam.lab.engine.settings import from_dict

SMALL = RunConfig(
    model="mlp",
    model_options={"hidden": [8]},
    epochs=2,
    optim=OptimConfig(warmup_epochs=1),
    lift=LiftConfig(dim=4, rho_max=2.0),
    device="cpu",
    checkpoint_every=1,
)


def rewritten(data: bytes, change: Callable[[str, bytes], bytes], kind: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", kind) as new:
        for member in old.infolist():
            new.writestr(member.filename, change(member.filename, old.read(member)))
    return out.getvalue()


def saved(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def put(folder: Path, data: bytes) -> None:
    """The bytes as a checkpoint whose manifest fits."""
    (folder / "epoch-000001").mkdir(parents=True)
    (folder / "epoch-000001" / "state.pt").write_bytes(data)
    manifest = {"format": 1, "epoch": 1, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "epoch-000001" / "manifest.json").write_text(json.dumps(manifest))


class _Asks:
    """Pickled, it asks for what weights_only loading allows and no checkpoint has."""

    def __reduce__(self) -> tuple[Any, ...]:
        return bytearray, (2**33,)


def _compressed() -> bytes:
    return rewritten(saved({"w": torch.zeros(10**6)}), lambda _, data: data, zipfile.ZIP_DEFLATED)


def _stretched() -> bytes:
    """A tensor of 2**31 - 1 elements over a storage of four, by a stride of zero."""

    def change(name: str, data: bytes) -> bytes:
        if not name.endswith("data.pkl"):
            return data
        size, stride = b"K\x04\x85", b"K\x01\x85"
        assert data.count(size) == data.count(stride) == 1
        return data.replace(size, b"J" + struct.pack("<i", 2**31 - 1) + b"\x85").replace(stride, b"K\x00\x85")

    return rewritten(saved({"w": torch.zeros(4)}), change)


def _asking() -> bytes:
    asked = pickle.dumps({"w": _Asks()}, protocol=2)
    return rewritten(saved({}), lambda name, data: asked if name.endswith("data.pkl") else data)


def _wordy() -> bytes:
    many = b"\x80\x02(" + b"]" * 9_000_000 + b"l."
    return rewritten(saved({}), lambda name, data: many if name.endswith("data.pkl") else data)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (_compressed, "it is compressed"),
        (_stretched, r"its tensors need 8,589,934,588 bytes, and the file has \d,\d"),
        (_asking, r"it asks for the Python object (__builtin__|builtins)\.bytearray"),
        (_wordy, "description of the tensors is over"),
    ],
)
def test_a_checkpoint_takes_no_more_memory_than_its_file(
    data: Callable[[], bytes], why: str, tmp_path: Path
) -> None:
    put(tmp_path, data())
    with (
        pytest.warns(checkpoint.CheckpointWarning, match=why),
        pytest.raises(checkpoint.CheckpointError, match="damaged"),
    ):
        checkpoint.latest(tmp_path)


def test_a_checkpoint_larger_than_the_run_implies_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(session.Interrupted):
        session.train(SMALL, tmp_path / "run", quiet=True, budget_seconds=0)
    put(tmp_path / "run" / "checkpoints", saved({"w": torch.zeros(10**6)}))
    with (
        pytest.warns(checkpoint.CheckpointWarning, match="while a state of this run has at most 1,"),
        pytest.raises(checkpoint.CheckpointError, match="damaged"),
    ):
        session.resume(tmp_path / "run", quiet=True)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"epochs": 10**6, "batch_size": 64}, "1,000,000 epochs of 20 steps are 20,000,000 steps"),
        ({"epochs": 30_000_000}, "epochs must be at most 1,000,000, got 30000000"),
        ({"lift": {"dim": 10**9}}, r"lift\.dim must be at most"),
        ({"lift": {"draws": 10**12}}, r"lift\.draws must be at most"),
        ({"lift": {"dim": 2**16}}, r"lift\.dim=65536 .* take 640 GiB for covariances and samples"),
        ({"lift": {"dim": 2**16, "draws": 2**16, "structure": "diagonal"}}, "take 640 GiB"),
        ({"model_options": {"hidden": [10**10]}}, r"mlp .* would have [\d,]* parameters"),
        ({"model_options": {"hidden": [10**19]}}, "mlp cannot be built"),
        (
            {"model_options": {"hidden": [10**6, 10**6]}},
            r"mlp .* would have 1,000,0\d\d,\d\d\d,\d\d\d parameters",
        ),
    ],
)
def test_settings_that_would_fill_the_memory_are_refused(
    settings: dict[str, Any], why: str, tmp_path: Path
) -> None:
    values = to_dict(SMALL)
    for key, value in settings.items():
        values[key] = values[key] | value if isinstance(value, dict) and key == "lift" else value
    with pytest.raises(ProtoSeamError, match=why):
        session.train(from_dict(values), tmp_path / "run", quiet=True)
