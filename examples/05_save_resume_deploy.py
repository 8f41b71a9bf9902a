"""Stop, save, resume as if nothing had happened, and ship the plain network; about 2 s.

Writes checkpoint.pt and model.safetensors into the current folder.
"""

import torch
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from torch import nn

import protoseam as ps

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 8 - 1, torch.tensor(labels)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
EPOCHS = 4


def start() -> tuple[ps.Lifted, torch.optim.Optimizer]:
    schedule = ps.SineAnneal(4, 8)  # few epochs: a ρ that does not jump
    net = ps.lift(model, num_classes=10, dim=8, covariance=ps.RunningCovariance(), schedule=schedule)
    return net, torch.optim.SGD(net.param_groups(lr=0.01), momentum=0.9, nesterov=True)


def train(net: ps.Lifted, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for epoch in range(first, last):
        net.set_progress(epoch, EPOCHS)
        for rows in torch.randperm(len(x)).split(128):
            optimizer.zero_grad()
            net.objective(x[rows], y[rows]).total.backward()
            optimizer.step()
        net.refresh()


net, optimizer = start()
net.initialize([(x, y)])
train(net, optimizer, 0, 2)
# Prototypes, factors, running moments and ρ are all in the state_dict; the random state is torch's own.
state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
torch.save(state, "checkpoint.pt")
train(net, optimizer, 2, EPOCHS)

again, optimizer = start()
state = torch.load("checkpoint.pt", weights_only=True)
again.load_state_dict(state["net"])
optimizer.load_state_dict(state["optimizer"])
torch.set_rng_state(state["rng"])
train(again, optimizer, 2, EPOCHS)
resumed = again.state_dict()
same = all(torch.equal(value, resumed[name]) for name, value in net.state_dict().items())
print(f"4 epochs at once and 2 + 2 epochs are bitwise the same: {same}")

save_file(net.deploy(fold=True).state_dict(), "model.safetensors")
model.load_state_dict(
    load_file("model.safetensors")
)  # the model as it was before; ProtoSeam is no longer needed
with torch.no_grad():
    error = (model(x) - net.eval()(x)).abs().max() / net(x).abs().max()
print(f"the shipped network's logits are within {error:.0e} of the lifted one's")
