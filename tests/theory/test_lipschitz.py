"""G: the paper's constant, the sharp one, products for deeper heads, and refusals."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from theory_oracles import PROPERTY, losses, normal, rng
from torch import nn

from protoseam.theory import class_lipschitz, head_lipschitz
from protoseam.theory.lipschitz import _ACTIVATIONS


def _gradient_norms(head: nn.Module, label: int, z: torch.Tensor) -> torch.Tensor:
    z = z.clone().requires_grad_()
    target = torch.full((len(z),), label)
    nn.functional.cross_entropy(head(z), target, reduction="sum").backward()
    assert z.grad is not None
    return z.grad.norm(dim=1)


def _linear(seed: int, classes: int, dim: int) -> nn.Linear:
    head = nn.Linear(dim, classes).double()
    with torch.no_grad():
        head.weight.copy_(2 * normal(rng(seed), classes, dim))
    return head


@PROPERTY
@given(st.integers(0, 10**6), st.integers(2, 6), st.integers(1, 5))
def test_linear_constants_bound_every_gradient(seed: int, classes: int, dim: int) -> None:
    head = _linear(seed, classes, dim)
    assert head_lipschitz(head) == pytest.approx(
        math.sqrt(2) * float(torch.linalg.svdvals(head.weight.detach())[0])
    )
    z = 5 * normal(rng(seed + 1), 64, dim)
    for label, sharp in enumerate(class_lipschitz(head).tolist()):
        assert float(_gradient_norms(head, label, z).max()) <= sharp + 1e-9
        assert sharp <= head_lipschitz(head) + 1e-9


@PROPERTY
@given(st.integers(0, 10**6), st.integers(2, 6), st.integers(1, 5))
def test_class_constant_is_approached_far_out(seed: int, classes: int, dim: int) -> None:
    head = _linear(seed, classes, dim)
    weight = head.weight.detach()
    for label, sharp in enumerate(class_lipschitz(head).tolist()):
        far = (weight - weight[label]).norm(dim=1).argmax()
        z = 1e6 * (weight[far] - weight[label]).unsqueeze(0)
        assert float(_gradient_norms(head, label, z)) == pytest.approx(sharp, rel=1e-6)


def test_paper_constant_is_attained_by_the_identity_head_but_not_after_a_shift() -> None:
    head = nn.Linear(3, 3).double()
    with torch.no_grad():
        head.weight.copy_(torch.eye(3))
    torch.testing.assert_close(class_lipschitz(head), torch.full((3,), head_lipschitz(head)).double())
    with torch.no_grad():
        head.weight.add_(torch.tensor([7.0, 0.0, 0.0]))  # softmax does not see it; ‖W2‖₂ does
    torch.testing.assert_close(class_lipschitz(head), torch.full((3,), math.sqrt(2)).double())
    assert head_lipschitz(head) > 10


@pytest.mark.parametrize("activation", [*_ACTIVATIONS, nn.LeakyReLU, nn.PReLU, nn.ELU])
def test_activation_constants_are_the_largest_slopes(activation: type[nn.Module]) -> None:
    torch.manual_seed(0)
    layer = activation().double()
    one = nn.Linear(1, 1).double()
    two = nn.Linear(1, 2).double()
    with torch.no_grad():
        one.weight.fill_(1.0)
        two.weight.copy_(torch.tensor([[1.0], [0.0]]))  # ‖W‖₂ = 1
    bound = head_lipschitz(nn.Sequential(one, layer, two)) / math.sqrt(2)
    x = torch.linspace(-8, 8, 200_001, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(layer(x).sum(), x)
    largest = float(slope.abs().max())
    assert largest <= bound + 1e-9
    assert bound <= largest * 1.002 + 1e-3  # and not much more than needed


@PROPERTY
@given(st.integers(0, 10**6))
def test_product_bounds_every_gradient_of_a_deep_head(seed: int) -> None:
    torch.manual_seed(seed)
    head = nn.Sequential(
        nn.Linear(4, 6), nn.GELU(), nn.Dropout(0.3), nn.Sequential(nn.Linear(6, 5), nn.Identity()), nn.Tanh(),
        nn.Linear(5, 3),
    ).double()  # fmt: skip
    head.eval()
    z = 3 * normal(rng(seed), 64, 4)
    for label, sharp in enumerate(class_lipschitz(head).tolist()):
        assert float(_gradient_norms(head, label, z).max()) <= sharp <= head_lipschitz(head)


def test_neighbouring_linears_are_folded_before_the_norm() -> None:
    torch.manual_seed(0)
    a, b = nn.Linear(4, 8).double(), nn.Linear(8, 3).double()
    folded = math.sqrt(2) * float(torch.linalg.svdvals((b.weight @ a.weight).detach())[0])
    assert head_lipschitz(nn.Sequential(a, b)) == pytest.approx(folded)


def test_deep_constant_is_the_product_of_norms_and_slopes() -> None:
    torch.manual_seed(0)
    a, b, c = nn.Linear(4, 5).double(), nn.Linear(5, 6).double(), nn.Linear(6, 3).double()
    norms = [float(torch.linalg.svdvals(layer.weight.detach())[0]) for layer in (a, b, c)]
    head = nn.Sequential(a, nn.GELU(), b, nn.Sigmoid(), c)
    assert head_lipschitz(head) == pytest.approx(math.sqrt(2) * math.prod(norms) * 1.13 * 0.25)


def test_refuses_what_it_cannot_bound() -> None:
    with pytest.raises(TypeError, match=r"no constant for LayerNorm.*pass your own G"):
        head_lipschitz(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2)))
    with pytest.raises(ValueError, match=r"does not end in nn\.Linear"):
        head_lipschitz(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))


@PROPERTY
@given(st.integers(0, 10**6))
def test_losses_are_lipschitz_between_points(seed: int) -> None:
    head = _linear(seed, 4, 3)
    weight, bias = head.weight.detach(), head.bias.detach()
    a, b = 4 * normal(rng(seed + 1), 32, 3), 4 * normal(rng(seed + 2), 32, 3)
    for label in range(4):
        loss = losses(weight, bias, label)
        assert ((loss(a) - loss(b)).abs() <= head_lipschitz(head) * (a - b).norm(dim=1) + 1e-9).all()
