"""How the seam learns the spread of each class: four estimators, three structures; about 6 s."""

import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import protoseam as ps

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 8 - 1, torch.tensor(labels)
x_test, y_test = x[1200:], y[1200:]
loader = DataLoader(TensorDataset(x[:1200], y[:1200]), batch_size=128, shuffle=True)
EPOCHS = 10

ESTIMATORS = {
    "exact, full": ps.ExactCovariance(floor=0.1),  # one more forward pass an epoch; the paper's benchmarks
    "exact, diagonal": ps.ExactCovariance(structure="diagonal"),  # n·k numbers instead of n·k²
    "exact, shared": ps.ExactCovariance(structure="shared"),  # one matrix for all classes
    "exact, auto floor": ps.ExactCovariance(floor="auto"),  # σ0 that balances the risk bound
    "running": ps.RunningCovariance(),  # from the training batches themselves: no pass
    "isotropic 1/ρ": ps.IsotropicCovariance(),  # no statistics at all
    "exact → running": ps.SwitchCovariance(lr_below=0.5),  # once the learning rate has decayed
}

for name, estimator in ESTIMATORS.items():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    net = ps.lift(model, num_classes=10, dim=16, covariance=estimator)
    optimizer = torch.optim.SGD(net.param_groups(lr=0.01, weight_decay=1e-3), momentum=0.9, nesterov=True)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    net.initialize(loader)
    start = time.perf_counter()
    for epoch in range(EPOCHS):
        net.set_progress(epoch, EPOCHS, lr=rate.get_last_lr()[0])  # only the switch needs lr
        for batch, target in loader:
            optimizer.zero_grad()
            net.objective(batch, target).total.backward()
            optimizer.step()
        net.refresh(loader)  # a no-op, or almost, where no pass is needed
        rate.step()
    seconds = time.perf_counter() - start
    with torch.no_grad():
        accuracy = (net.eval()(x_test).argmax(1) == y_test).double().mean()
    numbers = net.covariance.factors.numel()
    print(f"{name:18s} {100 * accuracy:5.1f} %   {seconds:4.1f} s   {numbers:5d} numbers in the factors")
