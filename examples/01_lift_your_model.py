"""Your model, your loop: what changes when a classifier is trained lifted.

Trains a small network on scikit-learn's digits; about 2 s on a CPU.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import protoseam as ps

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 8 - 1, torch.tensor(labels)
x_test, y_test = x[1200:], y[1200:]
loader = DataLoader(TensorDataset(x[:1200], y[:1200]), batch_size=64, shuffle=True)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

# 1. Lift: the last Linear(128→10) becomes Linear(128→32) + Linear(32→10), with a prototype per class between them.
net = ps.lift(model, num_classes=10)
# 2. The optimizer gets N1 at your learning rate, and N2 and the prototypes at a faster one.
optimizer = torch.optim.SGD(net.param_groups(lr=0.05, weight_decay=5e-4), momentum=0.9)

# 3. Before the first epoch the prototypes move to the class means; each epoch has its own penalty ρ, and ends with
#    new estimates of how far each class spreads.
for epoch in net.epochs(loader, 15):
    for batch, target in loader:
        terms = net.objective(batch, target)  # 4. instead of cross_entropy(model(batch), target)
        optimizer.zero_grad()
        terms.total.backward()
        optimizer.step()
    if epoch % 5 == 4:
        print(
            f"epoch {epoch + 1:2d}  ρ {net.rho.item():4.1f}  consensus {terms.consensus.item():.3f}  "
            f"classification {terms.classification.item():.3f}  repulsion {terms.repulsion.item():.3f}"
        )

# 5. What is left is an ordinary module of the original architecture: no prototypes, no sampling.
plain = net.deploy(fold=True)
with torch.no_grad():
    accuracy = (plain(x_test).argmax(1) == y_test).double().mean()
print(plain)
print(f"test accuracy {100 * accuracy:.1f} %")
