"""What hosts ask of a lifted network besides training: Fabric, FSDP2, timm's names, Hugging Face's dicts."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import nn
from torch.distributed.fsdp import fully_shard
from toys import batches, lifted, sgd
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
)

import protoseam as ps
from protoseam.seam.guards import is_output_of

DATA = batches()


def test_fabric_sets_a_network_up() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    net = lifted(init="fsinit")
    model, optimizer = fabric.setup(net, sgd(net))
    before = net.prototypes.detach().clone()
    for _ in net.epochs(DATA, 2):
        for x, y in DATA:
            optimizer.zero_grad()
            fabric.backward(model(x, y).total)
            optimizer.step()
    assert net.progress.tolist() == [1, 2]
    assert not torch.equal(net.prototypes, before)


@pytest.mark.parametrize("part", ["net", "n1", "n2"])
def test_sharded_parameters_are_refused(part: str, tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        net = lifted(init="random")
        mesh = dist.init_device_mesh("cpu", (1,))
        fully_shard(net if part == "net" else getattr(net, part), mesh=mesh)
        for use in (
            lambda: net.initialize(DATA),
            lambda: net.set_progress(0, 2),
            lambda: net.objective(*DATA[0]),
        ):
            with pytest.raises(ps.SeamError, match=rf"{part} .*fully_shard.*DistributedDataParallel"):
                use()
    finally:
        dist.destroy_process_group()


def test_timms_parameter_groups() -> None:
    model = timm.create_model("test_vit", num_classes=5, img_size=32)
    net = ps.lift(model, num_classes=5, dim=4)
    assert net.no_weight_decay() == {f"n1.{name}" for name in model.no_weight_decay()} != set()
    no_decay, _ = param_groups_weight_decay(net, 0.1, no_weight_decay_list=net.no_weight_decay())
    assert any(p is net.n1.pos_embed for p in no_decay["params"])
    plain, groups = (param_groups_layer_decay(m, 0.1, layer_decay=0.5) for m in (model, net))

    def scale_of(groups: list[dict[str, Any]], parameter: torch.Tensor) -> float:
        (scale,) = [g["lr_scale"] for g in groups if any(p is parameter for p in g["params"])]
        return scale

    names = [name for name, _ in model.named_parameters() if not name.startswith("head.")]
    for name in names:
        found = scale_of(groups, net.n1.get_parameter(name))
        assert found == scale_of(plain, model.get_parameter(name)), name
    assert scale_of(groups, net.prototypes) == scale_of(groups, net.n2.weight) == 1.0
    assert len({scale_of(groups, net.n1.get_parameter(name)) for name in names}) > 2


def test_a_model_without_timms_methods() -> None:
    net = lifted()
    assert net.no_weight_decay() == set()
    assert not hasattr(net, "group_matcher")


@pytest.mark.parametrize("form", ["pairs", "labels", "label", "triples"])
def test_a_hugging_face_model_lifts_as_it_is(form: str) -> None:
    torch.manual_seed(0)
    config = DistilBertConfig(
        vocab_size=20, dim=8, n_layers=1, n_heads=2, hidden_dim=8, max_position_embeddings=6, num_labels=3,
        dropout=0.0, seq_classif_dropout=0.0,
    )  # fmt: skip
    net = ps.lift(DistilBertForSequenceClassification(config), num_classes=3, dim=3, draws=1)
    ids = torch.randint(0, 20, (12, 6))
    inputs, y = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, torch.arange(12) % 3
    batch: Any = {
        "pairs": (inputs, y), "triples": (inputs, y, list("abcdefghijkl")), "labels": inputs | {"labels": y},
        "label": inputs | {"label": y},
    }[form]  # fmt: skip
    before = net.n1.distilbert.embeddings.word_embeddings.weight.detach().clone()
    optimizer = torch.optim.AdamW(net.param_groups(lr=1e-3))
    for _ in net.epochs([batch], 2):
        optimizer.zero_grad()
        net.objective(inputs, y).total.backward()
        optimizer.step()
    assert not torch.equal(net.n1.distilbert.embeddings.word_embeddings.weight, before)
    assert net.class_count.tolist() == [4, 4, 4]
    net.eval()
    with torch.no_grad():
        plain = net.deploy(fold=True)
        assert torch.allclose(plain(**inputs).logits, net(inputs), atol=1e-5)
        assert isinstance(plain, DistilBertForSequenceClassification)


def test_a_decoder_that_classifies_by_its_last_token_is_lifted() -> None:
    """It applies its Linear to every token and then picks the last one that is no padding."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=6, num_labels=3, pad_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = GPT2ForSequenceClassification(config)
    data = []
    for padded in (0, 2):  # the tokens picked differ from batch to batch, and within one
        ids, y = torch.randint(3, 20, (12, 6)), torch.arange(12) % 3
        ids[:6, 6 - padded :] = 0
        data.append({"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": y})
    net = ps.lift(model, num_classes=3, dim=4)
    before = net.n1.score.weight.detach().clone()
    optimizer = torch.optim.AdamW(net.param_groups(lr=1e-3))
    for _ in net.epochs(data, 2):
        for batch in data:
            optimizer.zero_grad()
            net.objective(batch, batch["labels"]).total.backward()
            optimizer.step()
    assert not torch.equal(net.n1.score.weight, before)
    net.eval()
    plain = net.deploy(fold=True)
    with torch.no_grad():
        for batch in data:
            inputs = {name: part for name, part in batch.items() if name != "labels"}
            for deployed in (plain, net.deploy()):
                assert torch.allclose(deployed(**inputs).logits, net(inputs), atol=1e-5)
    model.load_state_dict(plain.state_dict())  # the architecture as it was


class Positions(nn.Module):
    """A Linear at every position of a sequence, and something behind it."""

    def __init__(self, behind: str) -> None:
        super().__init__()
        self.embed, self.score, self.behind = nn.Embedding(50, 16), nn.Linear(16, 4), behind

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        z = self.score(self.embed(ids))
        return {
            "last": lambda: z[:, -1],
            "mean": lambda: z.mean(1),
            "sum": lambda: z.sum(1) / z.shape[1],
            "other sample": lambda: z[:, -1].roll(1, 0),
            "largest": lambda: z.amax(1),
            "softmax": lambda: z[:, -1].softmax(1),
            "softmax of the mean": lambda: z.mean(1).softmax(1),
            "one number": lambda: z[:, :, 0],
        }[self.behind]()


@pytest.mark.parametrize("behind", ["last", "mean", "sum"])
def test_picking_or_averaging_positions_commutes_with_the_seam(behind: str) -> None:
    x, y = torch.randint(50, (8, 6)), torch.arange(8) % 4
    for options in ({}, {"at": "score", "probe": x}):
        net = ps.lift(Positions(behind), num_classes=4, dim=3, **options)  # type: ignore[arg-type]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*samples")  # two per class
            net.initialize([(x, y)])
        assert net.seam_layer == "score"
        net.eval()
        assert torch.allclose(net.deploy(fold=True)(x), net(x), atol=1e-6)


@pytest.mark.parametrize(
    "behind", ["other sample", "largest", "softmax", "softmax of the mean", "one number"]
)
def test_what_does_not_commute_with_the_seam_is_refused(behind: str) -> None:
    x, y = torch.randint(50, (8, 6)), torch.arange(8) % 4
    with pytest.raises(ps.SeamError, match="is not the output of its layer 'score'"):
        ps.lift(Positions(behind), num_classes=4, dim=3).initialize([(x, y)])


def test_positions_may_lie_before_the_samples() -> None:
    layer, recurrent = torch.randn(6, 8, 4), nn.GRU(5, 16)
    assert is_output_of(layer, layer[-1])
    assert not is_output_of(layer, layer[-1].roll(1, 0))

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.fc = recurrent, nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.gru(x)[0])[-1]

    net = ps.lift(Recurrent(), num_classes=4, dim=3, init="random")
    assert net.objective(torch.randn(6, 8, 5), torch.arange(8) % 4).total.isfinite()
