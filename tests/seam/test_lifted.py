"""The class users hold: routes of the gradients, logits, deployment, state, settings."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from pathlib import Path

import oracles
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from toys import CLASSES, DIM, FEATURES, HIDDEN, Noisy, batches, lifted, network, same, sgd, step, train

import protoseam as ps
from protoseam.seam.heads import scale_logits


def grads(net: ps.Lifted) -> dict[str, bool]:
    """Which of θ1, θ2 and S a backward has reached (all of each, or none)."""
    reached: dict[str, bool] = {}
    for name, parameters in {
        "θ1": [*net.n1.parameters()],
        "θ2": [*net.n2.parameters()],
        "S": [net.prototypes],
    }.items():
        touched = {p.grad is not None for p in parameters}
        assert len(touched) == 1
        reached[name] = touched.pop()
    return reached


# ---------------------------------------------------------------------- the objective


@pytest.mark.parametrize(
    ("term", "reached"),
    [
        ("consensus", {"θ1": True, "θ2": False, "S": True}),
        ("classification", {"θ1": False, "θ2": True, "S": True}),
        ("repulsion", {"θ1": False, "θ2": False, "S": True}),
        ("total", {"θ1": True, "θ2": True, "S": True}),
    ],
)
def test_gradient_routes(term: str, reached: dict[str, bool]) -> None:
    net = lifted()
    getattr(net.objective(*batches()[0]), term).backward()
    assert grads(net) == reached


def test_logits_do_not_depend_on_the_prototypes() -> None:
    net = lifted()
    F.cross_entropy(net(batches()[0][0]), batches()[0][1]).backward()
    assert grads(net) == {"θ1": True, "θ2": True, "S": False}


def test_no_gradient_crosses_the_seam() -> None:
    """θ1's gradient is the consensus term's, bit for bit, and θ2's the classification term's."""
    net = lifted()
    x, y = batches()[0]
    terms = net(x, y, generator=torch.Generator().manual_seed(0))
    total, pull, classify, _ = terms
    first, second = list(net.n1.parameters()), list(net.n2.parameters())
    whole = torch.autograd.grad(total, first + second, retain_graph=True)
    parts = torch.autograd.grad(pull, first, retain_graph=True) + torch.autograd.grad(classify, second)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_terms_against_the_loops() -> None:
    net = lifted(covariance=ps.IsotropicCovariance(variance=0.2, floor=0.1), draws=2, alpha=1.5).double()
    net.set_progress(3, 9)
    x, y = (t.double() if t.is_floating_point() else t for t in batches()[0])
    terms = net(x, y, generator=torch.Generator().manual_seed(4))
    rho = oracles.anneal(4, 9, 4.0, 8.0)
    assert net.rho.item() == pytest.approx(rho, rel=1e-6)
    rho = net.rho.item()
    s = net.prototypes.detach()
    assert terms.consensus.item() == pytest.approx(
        oracles.consensus(net.embed(x).tolist(), y.tolist(), s.tolist(), rho)
    )
    assert terms.repulsion.item() == pytest.approx(rho * oracles.repulsion(s.tolist(), 1.5))
    xi = torch.randn(2, CLASSES, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    logits = net.n2(s + net.covariance.factors.item() * xi)
    assert net.covariance.factors.item() == pytest.approx(0.21**0.5)
    assert terms.classification.item() == pytest.approx(oracles.classification(logits.tolist()))
    assert torch.equal(terms.total, terms.consensus + terms.classification + terms.repulsion)


def test_classification_does_not_depend_on_the_batch() -> None:
    net = lifted()
    a, b = (net(x, y, generator=torch.Generator().manual_seed(0)) for x, y in batches()[:2])
    assert torch.equal(a.classification, b.classification)
    assert torch.equal(a.repulsion, b.repulsion)
    assert not torch.equal(a.consensus, b.consensus)


def test_objective_is_the_call_with_labels() -> None:
    net = lifted()
    x, y = batches()[0]
    a, b = (f(x, y, generator=torch.Generator().manual_seed(0)) for f in (net, net.objective))
    assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def test_repulsion_has_a_scale_of_its_own_if_asked() -> None:
    x, y = batches()[0]
    nets = [lifted(init=torch.randn(CLASSES, DIM), repulsion_scale=scale) for scale in (None, 3.0)]
    nets[1].load_state_dict(nets[0].state_dict())
    tied, free = (net(x, y).repulsion for net in nets)
    assert torch.allclose(free / 3.0, tied / nets[0].rho)


def test_draws_antithetic_and_losses_are_passed_on() -> None:
    seen: list[Tensor] = []

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        seen.append(logits)
        return F.cross_entropy(logits, labels, label_smoothing=0.1)

    net = lifted(draws=4, antithetic=True, loss_fn=loss)
    terms = net(*batches()[0])
    assert seen[0].shape == (4 * CLASSES, CLASSES)
    assert torch.allclose(
        terms.classification, F.cross_entropy(seen[0], torch.arange(CLASSES).repeat(4), label_smoothing=0.1)
    )
    mirrored = (
        seen[0].reshape(2, 2, CLASSES, CLASSES).sum(0) / 2
    )  # a linear head: pairs average to the prototype's
    assert torch.allclose(mirrored, net.n2(net.prototypes).expand(2, -1, -1), atol=1e-5)


def test_frequency_weights_follow_the_data() -> None:
    x, y = batches()[0]
    net = lifted(class_weights="frequency")
    often = y == 0
    net.initialize([*batches(), *[(x[often], y[often])] * 4])
    assert y.bincount().tolist()[0] == 5
    assert net.class_count.tolist() == [36, 16, 16, 16]
    found = net(x, y, generator=torch.Generator().manual_seed(0)).classification
    xi = torch.randn(1, CLASSES, DIM, generator=torch.Generator().manual_seed(0))
    logits = net.n2(net.prototypes + 0.1 * xi)
    assert found.item() == pytest.approx(
        oracles.classification(logits.tolist(), [36 / 84, *[16 / 84] * 3]), rel=1e-5
    )


def test_frequency_weights_before_the_data_was_seen() -> None:
    with pytest.raises(ps.SeamError, match=r"frequency.*net\.initialize\(loader\)"):
        lifted(class_weights="frequency")(*batches()[0])


# ---------------------------------------------------------------------- logits and deployment


@pytest.mark.parametrize("training", [True, False])
def test_logits_are_the_deployed_networks_bit_for_bit(training: bool) -> None:
    net, x = lifted(), batches()[0][0]
    train(net, sgd(net), batches(), range(2), 2)
    net.train(training)
    plain = net.deploy()
    assert torch.equal(net(x), plain(x))
    assert torch.allclose(net(x), net.deploy(fold=True)(x), atol=1e-5)
    assert torch.equal(net(x), net.n2(net.embed(x)))
    assert net.training is training
    assert not plain.training


def test_deployment_with_batch_statistics() -> None:
    net, x = lifted(Noisy()), batches()[0][0]
    train(net, sgd(net), batches(), range(2), 2)
    net.eval()
    assert torch.equal(net(x), net.deploy()(x))
    folded = net.deploy(fold=True)
    assert torch.allclose(net(x), folded(x), atol=1e-5)
    assert [type(m) for m in folded.modules()] == [type(m) for m in Noisy().modules()]
    assert folded.state_dict().keys() == Noisy().state_dict().keys()


def test_the_deployed_network_is_a_copy_without_gradients() -> None:
    net = lifted()
    plain = net.deploy()
    plain(batches()[0][0]).sum().backward()
    assert not any(p.grad is not None for p in net.parameters())
    before = copy.deepcopy(plain.state_dict())
    step(net, sgd(net), *batches()[0])
    assert same(plain.state_dict(), before)


@pytest.mark.parametrize("bias", [(True, True), (True, False), (False, True), (False, False)])
def test_fold_with_and_without_biases(bias: tuple[bool, bool]) -> None:
    n1 = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, DIM, bias=bias[0]))
    net = ps.lift((n1, nn.Linear(DIM, CLASSES, bias=bias[1])), init="random")
    folded, x = net.deploy(fold=True), batches()[0][0]
    assert torch.allclose(folded(x), net(x), atol=1e-6)
    assert [type(m) for m in folded] == [nn.Linear, nn.Tanh, nn.Linear]
    assert (folded[2].bias is not None) == any(bias)
    alone = ps.lift((nn.Linear(FEATURES, DIM), nn.Linear(DIM, CLASSES)), init="random")
    assert torch.allclose(alone.deploy(fold=True)(x), alone(x), atol=1e-6)


def test_halves_that_end_in_nested_layers_are_folded_and_calibrated() -> None:
    n1 = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Sequential(nn.Tanh(), nn.Linear(HIDDEN, DIM)))
    net, x = ps.lift((n1, nn.Linear(DIM, CLASSES)), init="random"), batches()[0][0]
    assert torch.allclose(net.deploy(fold=True)(x), net(x), atol=1e-6)
    net = ps.lift((n1, nn.Sequential(nn.Sequential(net.n2))), init="random")
    logits = net(x)
    scale_logits(net.n2, 0.5)
    assert torch.allclose(net(x), 0.5 * logits, atol=1e-6)


def test_fold_needs_two_linears() -> None:
    net = ps.lift(
        (nn.Linear(FEATURES, DIM), nn.Sequential(nn.Tanh(), nn.Linear(DIM, CLASSES))), init="random"
    )
    with pytest.raises(ValueError, match=r"fold=True merges two Linears.*Linear and Sequential"):
        net.deploy(fold=True)
    assert torch.equal(net.deploy()(batches()[0][0]), net(batches()[0][0]))


class Cosine(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 10 * F.linear(F.normalize(x), F.normalize(self.weight))


def test_only_what_computes_an_affine_map_is_folded_and_only_a_plain_one_scaled() -> None:
    x, head = batches()[0][0], nn.Linear(DIM, CLASSES)
    cosine = ps.lift((nn.Linear(FEATURES, DIM), Cosine(DIM, CLASSES, bias=False)), init="random")
    normed = ps.lift((weight_norm(nn.Linear(FEATURES, DIM)), weight_norm(head)), init="random")
    with pytest.raises(ps.ArgumentError, match=r"fold=True merges two Linears.*Linear and Cosine"):
        cosine.deploy(fold=True)
    assert torch.allclose(normed.deploy(fold=True)(x), normed(x), atol=1e-6)
    for net, found in ((cosine, "Cosine"), (normed, "ParametrizedLinear")):
        with pytest.raises(ps.SeamError, match=f"N2 ends with {found}"):
            scale_logits(net.n2, 0.5)


def test_nothing_of_the_library_survives_deployment(tmp_path: Path) -> None:
    """Saved modules load, and compute the same, where protoseam cannot be imported."""
    halves = ps.split(network(), at="0", probe=batches()[0][0])
    normal = nn.Sequential(
        nn.Linear(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES)
    )
    nets = {
        "lifted": lifted(),
        "with batch statistics": lifted(normal),
        "split": ps.lift(halves, num_classes=CLASSES, dim=HIDDEN, init="random"),
    }
    x = batches()[0][0]
    saved = {}
    for name, net in nets.items():
        step(net, sgd(net), *batches()[0])
        for fold in (False,) if name == "split" else (False, True):
            plain = net.deploy(fold=fold)
            assert not any(
                "protoseam" in base.__module__ for m in plain.modules() for base in type(m).__mro__
            )
            assert not any(m._forward_hooks or m._forward_pre_hooks for m in plain.modules())
            saved[f"{name} {fold}"] = (plain, plain(x))
    torch.save({"x": x, "nets": saved}, tmp_path / "plain.pt")
    code = (
        "import sys; sys.modules['protoseam'] = None\n"
        "import torch\n"
        f"saved = torch.load({str(tmp_path / 'plain.pt')!r}, weights_only=False)\n"
        "for name, (net, logits) in saved['nets'].items():\n"
        "    assert torch.equal(net(saved['x']), logits), name\n"
        "print(len(saved['nets']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "5", done.stderr


# ---------------------------------------------------------------------- state and settings


def test_the_model_passed_in_stays_as_it_was() -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    net = lifted(model)
    train(net, sgd(net), batches(), range(2), 2)
    assert same(model.state_dict(), before)
    assert [type(m) for m in model] == [nn.Linear, nn.Tanh, nn.Linear]
    assert model[2].out_features == CLASSES


def test_state_round_trip() -> None:
    net = lifted(init="fsinit")
    net.initialize(batches())
    train(net, sgd(net), batches(), range(3), 5)
    buffer = io.BytesIO()
    torch.save(net.state_dict(), buffer)
    buffer.seek(0)
    other = lifted(init="fsinit")
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert same(other.state_dict(), net.state_dict())
    assert other.progress.tolist() == [2, 5]
    assert other.rho.item() == net.rho.item()
    assert other.class_count.tolist() == [16] * CLASSES
    x, y = batches()[0]
    a, b = (n(x, y, generator=torch.Generator().manual_seed(0)) for n in (net, other))  # ready: no initialize
    assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def test_a_copy_is_independent() -> None:
    net = lifted(covariance=ps.RunningCovariance())
    other = copy.deepcopy(net)
    before = copy.deepcopy(net.state_dict())
    train(other, sgd(other), batches(), range(1), 2)
    assert same(net.state_dict(), before)


def test_parameter_groups() -> None:
    net = lifted()
    groups = {g["name"]: g for g in net.param_groups(lr=0.1, weight_decay=0.01)}
    assert groups.keys() == {"n1", "n2", "prototypes"}
    assert [(g["lr"], g["weight_decay"]) for g in groups.values()] == [
        (0.1, 0.01),
        (3.0, pytest.approx(0.01 / 30)),
        (3.0, pytest.approx(0.01 / 30)),
    ]
    as_the_paper = net.param_groups(lr=0.1, weight_decay=0.01, seam_lr=0.1)
    assert {(g["lr"], g["weight_decay"]) for g in as_the_paper} == {(0.1, 0.01)}
    slower = net.param_groups(lr=0.1, seam_lr=0.2)
    assert [g["lr"] for g in slower] == [0.1, 0.2, 0.2]
    assert sum(len(g["params"]) for g in groups.values()) == len(list(net.parameters()))
    assert groups["prototypes"]["params"][0] is net.prototypes
    own = net.param_groups(lr=0.1, weight_decay=0.01, prototype_lr=0.5, prototype_weight_decay=0.0)[-1]
    assert (own["lr"], own["weight_decay"]) == (0.5, 0.0)
    # without one of its own N1 gets the optimizer's, its default or what it is given; the seam has none
    for kind, options in ((torch.optim.AdamW, {}), (torch.optim.SGD, {"weight_decay": 0.01})):
        given = kind(net.param_groups(lr=0.1), **options)
        assert [g["weight_decay"] for g in given.param_groups] == [0.01, 0.0, 0.0]
    net.n1.requires_grad_(False)
    assert [g["name"] for g in net.param_groups(lr=0.1)] == ["n2", "prototypes"]


def test_schedules_and_positions() -> None:
    net = lifted(schedule=lambda epoch, epochs: 2.0 + epoch / epochs)
    net.set_progress(1, 4)
    assert net.rho.item() == 2.25
    assert net.progress.tolist() == [1, 4]
    default = ps.lift(network())
    assert default.rho.item() == 16.0
    default.set_progress(0, 10)
    assert default.rho.item() == 1.0
    assert lifted(schedule=ps.ConstantRho(3.0)).rho.item() == 3.0


@pytest.mark.parametrize("init", ["fsinit", "random", "unit", "given"])
def test_initial_prototypes(init: str) -> None:
    given = torch.randn(CLASSES, CLASSES)
    net = lifted(dim=CLASSES, init=given if init == "given" else init)
    before = net.prototypes.detach().clone()
    net.initialize(batches())
    z = torch.cat([net.embed(x) for x, _ in batches()])
    y = torch.cat([y for _, y in batches()])
    if init == "fsinit":
        _, means, _ = oracles.moments(z.tolist(), y.tolist(), CLASSES)
        assert torch.allclose(net.prototypes, torch.tensor(means), atol=1e-6)
    else:
        assert torch.equal(net.prototypes, before)
        expected = {"unit": torch.eye(CLASSES), "given": given}.get(init, before)
        assert torch.equal(net.prototypes, expected)
    assert net.class_count.tolist() == [16] * CLASSES
    assert net.prototypes.requires_grad


def test_data_that_was_swept_elsewhere() -> None:
    net, same_net = lifted(init="fsinit"), lifted(init="fsinit")
    same_net.load_state_dict(net.state_dict())
    with torch.no_grad():
        z, y = torch.cat([net.embed(x) for x, _ in batches()]), torch.cat([y for _, y in batches()])
    net.initialize(batches())
    net.refresh(batches())
    same_net.initialize(embeddings=(z, y))
    same_net.refresh(embeddings=(z, y))
    assert same(net.state_dict(), same_net.state_dict())


def test_a_sweep_leaves_modes_and_batch_statistics_alone() -> None:
    net = lifted(Noisy(), init="fsinit")
    net.n1.body[3].eval()  # frozen by hand
    before = {name: b.clone() for name, b in net.n1.named_buffers()}
    net.initialize(batches())
    assert same(dict(net.n1.named_buffers()), before)
    assert net.training
    assert not net.n1.body[3].training


def test_before_the_first_step_a_sweep_normalises_by_its_batches() -> None:
    net = lifted(Noisy(), init="fsinit")
    ((x, y),) = batches(size=64)
    net.initialize([(x, y)])
    hidden = net.n1.body[0](x)
    normal = (hidden - hidden.mean(0)) / (hidden.var(0, correction=0) + 1e-5).sqrt()
    z = net.n1.fc(torch.tanh(normal))
    expected = torch.stack([z[y == c].mean(0) for c in range(CLASSES)])
    assert torch.allclose(net.prototypes, expected, atol=1e-5)


def test_settings_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="'uniform', 'frequency', got 'balanced'"):
        lifted(class_weights="balanced")
    with pytest.raises(ValueError, match=r"'fsinit', 'random', 'unit'.* got 'zeros'"):
        lifted(init="zeros")
    with pytest.raises(ValueError, match=rf"shape \({CLASSES}, {DIM}\); got \(2, 2\)"):
        lifted(init=torch.zeros(2, 2))
    with pytest.raises(ValueError, match="unit-vector prototypes need dim = num_classes"):
        lifted(init="unit")
