"""Imbalanced classes, another classification loss, more draws, a repulsion of its own; about 3 s."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import protoseam as ps

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 8 - 1, torch.tensor(labels)
x_test, y_test = x[1200:], y[1200:]
x, y = x[:1200], y[:1200]
keep = (y >= 5) | (torch.arange(1200) % 4 == 0)  # of the digits 0–4 only every fourth image
loader = DataLoader(TensorDataset(x[keep], y[keep]), batch_size=64, shuffle=True)


def smoothed(logits: Tensor, target: Tensor) -> Tensor:
    """Any Lcls will do. One loss a row, because class weights have to be applied to them."""
    return F.cross_entropy(logits, target, label_smoothing=0.1, reduction="none")


for weights in ("uniform", "frequency"):  # 1/n, or |D_i|/m (the paper's remark (ii))
    torch.manual_seed(0)
    net = ps.lift(
        nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
        num_classes=10,
        dim=12,
        loss_fn=smoothed,
        class_weights=weights,
        draws=4,  # samples a class and step; their cost does not depend on the batch
        antithetic=True,  # in pairs ξ, −ξ
        repulsion_scale=1.0,  # a weight of its own instead of ρ
        schedule=lambda epoch, epochs: 1 + epoch,  # any (epoch, epochs) → ρ
    )
    optimizer = torch.optim.AdamW(net.param_groups(lr=1e-2, weight_decay=1e-2, prototype_weight_decay=0.0))
    net.initialize(loader)
    epochs = 20
    for epoch in range(epochs):
        net.set_progress(epoch, epochs)
        for batch, target in loader:
            optimizer.zero_grad()
            net.objective(batch, target).total.backward()
            optimizer.step()
        net.refresh(loader)
    with torch.no_grad():
        right = (net.eval()(x_test).argmax(1) == y_test).double()
    rare, common = right[y_test < 5].mean(), right[y_test >= 5].mean()
    counts = net.class_count.tolist()
    print(f"{weights:9s}  rare digits {100 * rare:.1f} %  common {100 * common:.1f} %  class counts {counts}")
