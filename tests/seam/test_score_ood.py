"""net.score_ood: the seam's own Mahalanobis score, and pytorch-ood's detectors on net.embed."""

from __future__ import annotations

import oracles
import pytest
import torch
import toys

import protoseam as ps


def test_it_is_the_distance_to_the_nearest_gaussian() -> None:
    data = toys.batches()
    net = toys.lifted()
    toys.train(net, toys.sgd(net), data, range(2), 2)
    net.eval()
    x = data[0][0]
    z, s, factors = net.embed(x).tolist(), net.prototypes.tolist(), net.covariance.factors.tolist()
    expected = [min(oracles.mahalanobis(row, c, f) for c, f in zip(s, factors, strict=True)) for row in z]
    torch.testing.assert_close(net.score_ood(x), torch.tensor(expected, dtype=torch.float64))


def test_detectors_of_pytorch_ood_take_embed_and_the_network_as_they_are() -> None:
    from pytorch_ood.detector import KNN, EnergyBased, Mahalanobis

    data = toys.batches()
    net = toys.lifted()
    toys.train(net, toys.sgd(net), data, range(20), 20)
    net.eval()
    x = data[0][0]
    far = 5 * torch.randn_like(x)
    scores = {
        "seam": net.score_ood,
        "mahalanobis": Mahalanobis(net.embed).to("cpu").fit(data).predict,
        "knn": KNN(net.embed).to("cpu").fit(data).predict,
    }
    for name, score in scores.items():
        assert score(far).median() > score(x).median(), name
    torch.testing.assert_close(EnergyBased(net).predict(x), -net(x).logsumexp(1))


def test_before_initialisation_it_is_refused() -> None:
    with pytest.raises(ps.SeamError, match="prototypes have no values yet"):
        toys.lifted(init="fsinit").score_ood(toys.batches()[0][0])
