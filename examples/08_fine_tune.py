"""A trained network learns new classes from few images: a slower body, and a last layer that is fitted.

Trains a small CNN on the digits 0 to 4, then takes it to 5 to 9 with 300 images in three epochs; about 5 s on a CPU.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import protoseam as ps

torch.manual_seed(0)
digits = load_digits()
x = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32)
y = torch.tensor(digits.target)
old, new = y < 5, y >= 5
order = torch.randperm(int(new.sum()))
train, test = order[:300], order[300:]
x_new, y_new = x[new], y[new] - 5

model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(256, 5),
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(5):
    for batch, target in DataLoader(TensorDataset(x[old], y[old]), batch_size=64, shuffle=True):
        loss = F.cross_entropy(model(batch), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

# The last Linear is replaced, so its old classes do not matter; the body is what was learned.
loader = DataLoader(TensorDataset(x_new[train], y_new[train]), batch_size=32, shuffle=True)
net = ps.lift(model, num_classes=5)
# The body at a third of the rate of the new layer; body_lr=0 would freeze it.
optimizer = torch.optim.AdamW(net.param_groups(lr=3e-3, body_lr=1e-3))
for _ in net.epochs(loader, 3):
    for batch, target in loader:
        loss = net.objective(batch, target).total
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

# In three epochs N2 cannot learn enough. So after the last one net.epochs has fitted the two Linears around the seam to
# the features of the 300 images.
plain = net.deploy(fold=True)
with torch.no_grad():
    accuracy = (plain(x_new[test]).argmax(1) == y_new[test]).double().mean()
print(f"test accuracy on the new classes {100 * accuracy:.1f} %")
