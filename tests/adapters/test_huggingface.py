"""Lifted text and image classifiers under the real Trainer: training, evaluation, accumulation, resume, deployment."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from processes import leave_together

if multiprocessing.current_process().name != "MainProcess":
    import conftest  # noqa: F401  (a spawned process imports torchvision as the tests do)

from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

import protoseam as ps
from protoseam.adapters.huggingface import LiftedForTrainer, SeamCallback

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
CLASSES = 3


@pytest.fixture(autouse=True)
def _forget_accelerate() -> Any:
    """The Trainer's accelerate has one state per process."""
    yield
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


class Texts(Dataset[dict[str, Any]]):
    """Sequences in which the tokens of one class are frequent; ``row`` is a column that the model does not take."""

    def __init__(self, n: int = 48, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.arange(n) % CLASSES
        own = 4 * self.labels[:, None] + torch.randint(0, 4, (n, 6), generator=g)
        any_token = torch.randint(0, 12, (n, 6), generator=g)
        self.ids = torch.where(torch.rand(n, 6, generator=g) < 0.9, own, any_token)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, Any]:
        mask = torch.ones(6, dtype=torch.long)
        return {"input_ids": self.ids[i], "attention_mask": mask, "label": int(self.labels[i]), "row": i}


class Images(Dataset[dict[str, Any]]):
    def __init__(self, n: int = 48, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.arange(n) % CLASSES
        self.pixels = 0.3 * torch.randn(n, 3, 8, 8, generator=g)
        self.pixels[torch.arange(n), self.labels] += 1.0

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"pixel_values": self.pixels[i], "labels": int(self.labels[i])}


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def text_model(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = BertConfig(vocab_size=12, max_position_embeddings=8, num_labels=CLASSES, **SMALL, **options)
    return BertForSequenceClassification(config)


def image_model() -> nn.Module:
    torch.manual_seed(0)
    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_labels=CLASSES, **SMALL))


def lifted(model: nn.Module, **options: Any) -> LiftedForTrainer:
    return LiftedForTrainer(ps.lift(model, num_classes=CLASSES, dim=4, **options))


def trainer(model: LiftedForTrainer, out: Path, data: Any, **arguments: Any) -> Trainer:
    args = TrainingArguments(str(out), learning_rate=5e-3, disable_tqdm=True, **arguments)
    return Trainer(
        model,
        args,
        train_dataset=data,
        eval_dataset=data,
        callbacks=[SeamCallback()],
        optimizers=model.optimizers(args),
    )


@pytest.mark.parametrize("kind", ["text", "image"])
def test_default_arguments_train_and_evaluate(kind: str, tmp_path: Path) -> None:
    model, data = (text_model(), Texts()) if kind == "text" else (image_model(), Images())
    run = trainer(lifted(model), tmp_path, data, num_train_epochs=12)
    run.train()
    told = run.evaluate(type(data)(seed=1))
    found = run.predict(type(data)(seed=1))
    assert (found.predictions.argmax(1) == found.label_ids).mean() > 0.9
    logits, labels = torch.tensor(found.predictions), torch.tensor(found.label_ids)
    assert told["eval_loss"] == pytest.approx(float(nn.functional.cross_entropy(logits, labels)), rel=1e-4)
    assert run.model.net.progress.tolist() == [11, 12]
    assert float(run.model.net.rho) == 16
    assert type(run.model.deploy()) is type(model)


AUTO = """
import sys
sys.modules["protoseam"] = None
sys.path.insert(0, sys.argv[2])
import torchvision_ops
import torch, transformers
for task, name in (("SequenceClassification", "input_ids"), ("ImageClassification", "pixel_values")):
    folder = sys.argv[1] + "/" + name
    model = getattr(transformers, "AutoModelFor" + task).from_pretrained(folder).eval()
    with torch.no_grad():
        torch.save(model(**{name: torch.load(folder + "/inputs.pt")}).logits, folder + "/logits.pt")
"""


def test_the_deployed_model_loads_by_its_auto_class_without_this_library(tmp_path: Path) -> None:
    cases = {"input_ids": (text_model(), Texts().ids), "pixel_values": (image_model(), Images().pixels)}
    expected = {}
    for name, (model, inputs) in cases.items():
        wrapped = lifted(model).eval()
        with torch.no_grad():
            expected[name] = wrapped(**{name: inputs})["logits"]
        wrapped.deploy().save_pretrained(tmp_path / name)
        torch.save(inputs, tmp_path / name / "inputs.pt")
    words = [sys.executable, "-W", "ignore", "-c", AUTO, str(tmp_path), str(Path(__file__).parents[1])]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name, logits in expected.items():
        torch.testing.assert_close(torch.load(tmp_path / name / "logits.pt"), logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "covariance", [ps.RunningCovariance(), ps.ExactCovariance()], ids=["running", "exact"]
)
@pytest.mark.parametrize("step", [4, 6])  # of 6 per epoch: within the first epoch, and at its very end
def test_resume_is_exact(covariance: ps.AbstractCovariance, step: int, tmp_path: Path) -> None:
    def made(out: Path) -> Trainer:
        model = lifted(text_model(), covariance=covariance)  # with dropout: the random state matters
        return trainer(model, out, Texts(), num_train_epochs=3, save_steps=step)

    whole = made(tmp_path / "a")
    whole.train()
    again = made(tmp_path / "b")
    again.train(resume_from_checkpoint=str(tmp_path / "a" / f"checkpoint-{step}"))
    one, two = whole.model.state_dict(), again.model.state_dict()
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


def test_accumulated_batches_are_one_batch(tmp_path: Path) -> None:
    """N1's gradient is a mean over the samples; batches of 4 and 12 must not count alike in any other way."""

    def step(size: int, accumulate: int) -> Tensor:
        model = lifted(text_model(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0), refit=False)
        args = TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulate,
            max_steps=1,
            max_grad_norm=0.0,
            disable_tqdm=True,
        )
        groups = model.net.param_groups(lr=10.0, bounded=False)
        optimizers = (torch.optim.SGD(groups), None)
        Trainer(model, args, train_dataset=Texts(), callbacks=[SeamCallback()], optimizers=optimizers).train()
        return model.net.n1.classifier.weight.detach().clone()

    before = lifted(text_model()).net.n1.classifier.weight
    one, three = step(12, 1), step(4, 3)
    assert (one - before).abs().max() > 1e-2
    torch.testing.assert_close(three - before, one - before, rtol=1e-3, atol=1e-5)


def test_bfloat16_keeps_the_seam_in_float32(tmp_path: Path) -> None:
    run = trainer(lifted(text_model()), tmp_path, Texts(), num_train_epochs=12, bf16=True, use_cpu=True)
    run.train()
    assert run.model.net.prototypes.dtype == torch.float32
    found = run.predict(Texts(seed=1))
    assert (found.predictions.argmax(1) == found.label_ids).mean() > 0.9


def test_gradient_checkpointing_changes_no_number(tmp_path: Path) -> None:
    renamed = "activation_checkpointing" in inspect.signature(TrainingArguments).parameters
    name = "activation_checkpointing" if renamed else "gradient_checkpointing"

    def trained(checkpointing: bool) -> dict[str, Tensor]:
        run = trainer(lifted(text_model()), tmp_path, Texts(), num_train_epochs=2, **{name: checkpointing})
        run.train()
        assert getattr(run.model.net.n1, f"is_{name}") == checkpointing
        return run.model.state_dict()

    with_it, without = trained(True), trained(False)
    assert [name for name in without if not torch.equal(with_it[name], without[name])] == []


@pytest.mark.parametrize("kind", ["text", "image"])
def test_noisy_embeddings_and_metrics_of_the_inputs(kind: str, tmp_path: Path) -> None:
    """Both ask the model itself: for its embeddings, and for the name of its inputs."""
    model, data = (text_model(), Texts()) if kind == "text" else (image_model(), Images())
    noise = {"neftune_noise_alpha": 5.0} if kind == "text" else {}
    run = trainer(lifted(model), tmp_path, data, num_train_epochs=2, include_for_metrics=["inputs"], **noise)
    run.compute_metrics = lambda found: {"inputs": len(found.inputs)}
    run.train()
    assert run.evaluate()["eval_inputs"] == len(data)


class SeamTrainer(Trainer):
    """As on the page: what replaces ``optimizers=`` for a ``model_init``."""

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer, _ = self.model.optimizers(self.args)
        return self.optimizer


def test_each_model_of_model_init_gets_an_optimizer_of_its_own(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), learning_rate=5e-3, num_train_epochs=2, disable_tqdm=True)
    options: dict[str, Any] = {"train_dataset": Texts(), "callbacks": [SeamCallback()]}
    run = SeamTrainer(args=args, model_init=lambda: lifted(text_model()), **options)
    rates = []
    for rate in (5e-3, 1e-3):
        run.args.learning_rate = rate  # as a search does
        run.train()
        groups = run.optimizer.param_groups
        assert {id(p) for group in groups for p in group["params"]} == {
            id(p) for p in run.model.net.parameters()
        }
        rates.append({group["name"]: group["initial_lr"] for group in groups})
    expected = [{"n1": rate, "n2": 30 * rate, "prototypes": 30 * rate} for rate in (5e-3, 1e-3)]
    assert rates == [pytest.approx(each) for each in expected]
    one_epoch = TrainingArguments(str(tmp_path), num_train_epochs=1, disable_tqdm=True)
    with pytest.warns(ps.SeamWarning, match="With model_init .* create_optimizer"):
        Trainer(args=one_epoch, model_init=lambda: lifted(text_model()), **options).train()


def process(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": (Path(folder) / "port").read_text()}
    os.environ |= address | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    # 45 samples: the sampler pads them to 48, which are 3 steps per epoch
    settings: dict[str, Any] = {"num_train_epochs": 2, "save_strategy": "epoch", "use_cpu": True}
    run = trainer(lifted(text_model()), Path(folder), Texts(n=45), **settings)
    run.train()
    again = trainer(lifted(text_model()), Path(folder), Texts(n=45), **settings)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    states = {"through": run.model.state_dict(), "resumed": again.model.state_dict()}
    torch.save({**states, "loss": run.evaluate()["eval_loss"]}, Path(folder) / f"{rank}.pt")
    leave_together()


def test_two_processes_count_each_sample_once_and_resume_exactly(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (tmp_path / "port").write_text(str(free.getsockname()[1]))
    mp.spawn(process, args=(2, str(tmp_path)), nprocs=2)
    one, two = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    state = one["through"]
    assert state["net.class_count"].tolist() == [15, 15, 15]
    for other in (two["through"], one["resumed"], two["resumed"]):
        assert [name for name in state if not torch.equal(state[name], other[name])] == []
    assert one["loss"] == pytest.approx(two["loss"])


def test_it_says_what_is_missing(tmp_path: Path) -> None:
    class Endless(IterableDataset[dict[str, Any]]):
        def __iter__(self) -> Any:
            yield from Texts()

    with pytest.raises(ps.SeamError, match=r"label_smoothing_factor=0.1 replaces the lifted objective"):
        trainer(lifted(text_model()), tmp_path, Texts(), label_smoothing_factor=0.1).train()
    with pytest.raises(ps.SeamError, match="the training data has no length"):
        trainer(lifted(text_model()), tmp_path, Endless(), max_steps=3).train()
    args = TrainingArguments(str(tmp_path), max_steps=1, disable_tqdm=True)
    with pytest.raises(ps.SeamError, match="found a BertForSequenceClassification in the Trainer"):
        Trainer(text_model(), args, train_dataset=Texts(), callbacks=[SeamCallback()]).train()
    with pytest.warns(ps.SeamWarning, match=r"pass optimizers=model\.optimizers\(args\)"):
        Trainer(lifted(text_model()), args, train_dataset=Texts(), callbacks=[SeamCallback()]).train()
    with pytest.raises(ps.SeamError, match="a training step came without labels"):
        lifted(text_model()).train()(input_ids=torch.zeros(2, 6, dtype=torch.long))
