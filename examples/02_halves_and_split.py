"""Where the seam goes: the last Linear, any named layer, or two halves of your own; about 1 s."""

import torch
from torch import nn

import protoseam as ps

torch.manual_seed(0)
x, y = torch.randn(120, 3, 16, 16), torch.arange(10).repeat(12)

model = nn.Sequential()
model.add_module("stem", nn.Conv2d(3, 16, 3, padding=1))
model.add_module("act", nn.ReLU())
model.add_module("pool", nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()))
model.add_module("embed", nn.Linear(16, 8))
model.add_module("norm", nn.LayerNorm(8))
model.add_module("act2", nn.GELU())
model.add_module("fc", nn.Linear(8, 10))

# The default: the last Linear makes room for two, dim wide in between.
net = ps.lift(model, num_classes=10, dim=4)
print(f"at the last Linear: seam behind {net.seam_layer!r}, {net.dim} wide")

# Any other place: n1 ends with the named layer's output. The equality is checked on a probe, bit for bit.
n1, n2 = ps.split(model, at="norm", probe=x)
assert torch.equal(n2(n1(x)), model(x))
net = ps.lift((n1, n2), num_classes=10, dim=8)
print(f"behind 'norm': {net.dim} wide, N2 has {sum(p.numel() for p in n2.parameters())} parameters")

# The same in one call; the width is read off the layer.
net = ps.lift(model, at="embed", probe=x)
net.initialize([(x, y)])
print(f"behind 'embed': prototypes {tuple(net.prototypes.shape)}")

# Halves you wrote yourself are taken as they are.
features, head = nn.Sequential(nn.Flatten(), nn.Linear(768, 8)), nn.Linear(8, 10)
print(f"own halves: {ps.lift((features, head)).num_classes} classes")

# Behind a ReLU-like activation a Gaussian cannot surround its prototype, so that is refused...
try:
    ps.lift(model, at="act2", probe=x)
except ValueError as error:
    print(f"refused: {error}")
# ...and so is a name that does not exist.
try:
    ps.split(model, at="nrom", probe=x)
except ValueError as error:
    print(f"refused: {error}")
