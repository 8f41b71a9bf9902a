"""The method from its pure functions, with no module in between: the paper's algorithm, line by line; about 2 s."""

import torch
from sklearn.datasets import load_digits
from torch import nn

from protoseam import core

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 8 - 1, torch.tensor(labels)
x_test, y_test, x, y = x[1200:], y[1200:], x[:1200], y[:1200]
CLASSES, DIM, EPOCHS, FLOOR = 10, 16, 12, 0.1

n1 = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, DIM))
n2 = nn.Linear(DIM, CLASSES)

# Line 1: FSInit, and factors of σ0² I until the data have been seen
with torch.no_grad():
    count_C, mean_CK, _ = core.class_moments(n1(x), y, CLASSES)
prototypes = nn.Parameter(core.forward_sweep(count_C, mean_CK).float())
factors = FLOOR * torch.eye(DIM).expand(CLASSES, DIM, DIM)

parameters = [*n1.parameters(), *n2.parameters(), prototypes]
optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-3)
for epoch in range(EPOCHS):
    rho = core.sine_anneal(epoch, EPOCHS, rho_min=1.0, rho_max=16.0)  # eq:anneal
    for rows in torch.randperm(len(x)).split(64):
        # eq:combinedLoss; N1 sees only the first term, N2 only the second, the prototypes all three
        loss = (
            core.consensus(n1(x[rows]), y[rows], prototypes, rho)
            + core.sampled_classification(n2, prototypes, factors, draws=2)
            + rho * core.repulsion(prototypes, alpha=2.0)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():  # eq:covariance, eq:shrinkage
        _, _, covariance_CKK = core.class_moments(n1(x), y, CLASSES)
        factors = core.factorize(covariance_CKK, FLOOR)[0].float()

spread = covariance_CKK.diagonal(dim1=1, dim2=2).sum(1).mean().sqrt()
distance = torch.pdist(prototypes.detach()).min()
with torch.no_grad():
    accuracy = (n2(n1(x_test)).argmax(1) == y_test).double().mean()
print(f"nearest prototypes {float(distance):.2f} apart, classes {float(spread):.2f} wide")
print(f"test accuracy {100 * accuracy:.1f} %")
