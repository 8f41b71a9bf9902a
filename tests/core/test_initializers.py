"""Where the prototypes start: class means, random directions, unit vectors."""

from __future__ import annotations

import oracles
import pytest
import torch

from protoseam.core import class_moments, forward_sweep, random_prototypes, unit_vectors


def test_forward_sweep_is_the_class_means() -> None:
    z, y = torch.randn(30, 4), torch.arange(30) % 3
    count, mean, _ = class_moments(z, y, 3)
    _, expected, _ = oracles.moments(z.tolist(), y.tolist(), 3)
    assert torch.allclose(forward_sweep(count, mean), torch.tensor(expected, dtype=torch.float64), rtol=1e-12)


def test_forward_sweep_names_one_empty_class() -> None:
    with pytest.raises(ValueError, match=r"but class 1 has no sample.*init='random'"):
        forward_sweep(torch.tensor([2, 0, 1]), torch.zeros(3, 2))


def test_forward_sweep_names_several_empty_classes() -> None:
    with pytest.raises(ValueError, match="but classes 0, 2 have no sample"):
        forward_sweep(torch.tensor([0, 1, 0]), torch.zeros(3, 2))


@pytest.mark.parametrize(("empty", "ending"), [(10, "8, 9 have"), (11, "8, 9, … have")])
def test_forward_sweep_names_ten_at_most(empty: int, ending: str) -> None:
    with pytest.raises(ValueError, match=f"classes 0, 1, .*{ending} no sample"):
        forward_sweep(torch.zeros(empty), torch.zeros(empty, 2))


@pytest.mark.parametrize("dim", [4, 256])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_random_prototypes_have_the_same_length_at_every_width(dim: int, scale: float) -> None:
    s = random_prototypes(2000, dim, scale=scale)
    assert s.shape == (2000, dim)
    assert s.square().sum(1).mean().sqrt().item() == pytest.approx(scale, rel=0.05)
    assert s.mean().abs() < 0.05 * scale


def test_random_prototypes_default_to_length_one_and_follow_the_generator() -> None:
    first, again = (random_prototypes(5, 3, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(first, again)
    drawn = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(first, drawn / 3**0.5)


def test_unit_vectors() -> None:
    assert torch.equal(unit_vectors(4, 4), torch.eye(4))
    with pytest.raises(ValueError, match=r"got dim=3, num_classes=4\. Lift with dim=4"):
        unit_vectors(4, 3)
