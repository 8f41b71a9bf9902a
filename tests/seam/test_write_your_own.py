"""docs/write-your-own.md: an estimator made of the code on that page alone trains, resumes and checks its arguments."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import CLASSES, DIM, batches, lifted, same, sgd, train

import protoseam as ps

PAGE = Path(__file__).parents[2] / "docs" / "write-your-own.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """The page's names, after its code has run."""
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    for block in BLOCKS:
        exec(compile(block, PAGE.name, "exec"), names)  # noqa: S102
    return names


def test_the_whole_page_trains_a_network(page: dict[str, Any]) -> None:
    net, x = page["net"], page["x"]
    assert net.progress.tolist() == [4, 5]
    assert float(net.rho) == pytest.approx(net.schedule(4, 5)) == 16.0
    assert torch.allclose(page["plain"](x), net.eval()(x), atol=1e-5)


def test_its_estimator_estimates_what_it_says(page: dict[str, Any]) -> None:
    kind = page["ShrunkCovariance"]
    net = lifted(covariance=kind(share=0.25, floor=0.2))
    net.refresh(batches())
    z = torch.cat([net.embed(x) for x, _ in batches()]).double().detach()
    y = torch.cat([y for _, y in batches()])
    centred = z - torch.stack([z[y == c].mean(0) for c in range(CLASSES)])[y]
    shared = centred.T @ centred / len(z)
    for c in range(CLASSES):
        own = centred[y == c].T @ centred[y == c] / int((y == c).sum())
        expected = 0.75 * own + 0.25 * shared + 0.04 * torch.eye(DIM).double()
        factor = net.covariance.factors[c].double()
        torch.testing.assert_close(factor @ factor.T, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ps.ProtoSeamError, match=r"1\.5"):
        kind(share=1.5)


def test_its_estimator_resumes(page: dict[str, Any]) -> None:
    net = lifted(covariance=page["ShrunkCovariance"]())
    train(net, sgd(net), batches(), range(2), 2)
    other = lifted(covariance=page["ShrunkCovariance"]())
    other.load_state_dict(net.state_dict())
    assert same(other.state_dict(), net.state_dict())
    assert not torch.equal(net.covariance.factors[0], net.covariance.factors[1])
