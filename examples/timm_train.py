"""Trains with timm's own parts: data loader, mixup, optimizer, schedule, clipping and EMA; about 10 s on a CPU."""

import timm
import torch
from PIL import Image
from sklearn.datasets import load_digits
from timm.data import Mixup, create_loader
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import dispatch_clip_grad

import protoseam as ps
from protoseam.adapters.timm import LiftedTask

torch.manual_seed(0)
EPOCHS, SIZE = 6, 16


class Digits(torch.utils.data.Dataset):
    """Images of scikit-learn's digits, every third for validation; timm's create_loader sets the transform."""

    def __init__(self, training: bool) -> None:
        x, y = load_digits(return_X_y=True)
        self.rows = [(x[i], y[i]) for i in range(len(y)) if (i % 3 > 0) == training]
        self.transform = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = Image.fromarray((15 * self.rows[index][0].reshape(8, 8)).astype("uint8"))
        return self.transform(image.convert("RGB")), self.rows[index][1]


net = ps.lift(timm.create_model("test_resnet", num_classes=10), num_classes=10)
how = {"hflip": 0.0, "scale": (0.8, 1.0), "num_workers": 0, "use_prefetcher": False}  # prefetching needs CUDA
train = create_loader(Digits(True), SIZE, 64, is_training=True, **how)
validation = create_loader(Digits(False), SIZE, 64, **how)
mixup = Mixup(mixup_alpha=0.2, num_classes=10, label_smoothing=0.0)  # smoothing is an option of ps.lift
task = LiftedTask(net)
task.setup_ema(decay=0.95)  # over about 20 of the 108 steps
optimizer = create_optimizer_v2(net.param_groups(lr=2e-3, weight_decay=0.05), opt="adamw")
scheduler, _ = create_scheduler_v2(optimizer, sched="cosine", num_epochs=EPOCHS)
for epoch in net.epochs(train, EPOCHS):  # its own looks at the data see no mixup
    task.train()
    for images, target in train:
        optimizer.zero_grad()
        task(*mixup(images, target))["loss"].backward()
        dispatch_clip_grad(task.get_clip_parameters(), 1.0)
        optimizer.step()
        task.update_ema()
    scheduler.step(epoch + 1)

plain = task.deploy(ema=True)  # an ordinary timm network
with torch.no_grad():
    right = torch.cat([plain(images).argmax(1) == target for images, target in validation])
print(f"{type(plain).__name__}: validation accuracy of the average {100 * right.double().mean():.1f} %")
