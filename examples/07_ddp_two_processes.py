"""Two processes, half the data each, one seam: DistributedDataParallel on the CPU; about 6 s."""

import gc
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import protoseam as ps

PROCESSES, EPOCHS = 2, 6


def worker(rank: int, meeting_point: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{meeting_point}", rank=rank, world_size=PROCESSES)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 8 - 1, torch.tensor(labels)
    x_test, y_test, x, y = x[1200:], y[1200:], x[:1200], y[:1200]
    own = [(x[rank::PROCESSES], y[rank::PROCESSES])]  # what a DistributedSampler would give this process

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    schedule = ps.SineAnneal(4, 16)  # few epochs: a gentle rise of ρ
    net = ps.lift(model, num_classes=10, dim=16, schedule=schedule)
    net.initialize(own)  # class means over both processes' data
    wrapped = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.param_groups(lr=0.01, weight_decay=1e-3), momentum=0.9, nesterov=True)
    torch.manual_seed(rank)  # each process shuffles and samples for itself
    for epoch in range(EPOCHS):
        net.set_progress(epoch, EPOCHS)
        for rows in torch.randperm(len(own[0][0])).split(32):
            terms = wrapped(own[0][0][rows], own[0][1][rows])  # net(x, y), through DDP
            optimizer.zero_grad()
            terms.total.backward()  # gradients are averaged, the prototypes' too
            optimizer.step()
        net.refresh(own)  # covariances over both processes' data

    mine = torch.cat([net.prototypes.detach().flatten(), net.covariance.factors.flatten()])
    everyone = [torch.empty_like(mine) for _ in range(PROCESSES)]
    dist.all_gather(everyone, mine)
    if rank == 0:
        with torch.no_grad():
            accuracy = (net.eval()(x_test).argmax(1) == y_test).double().mean()
        print(f"prototypes and factors are the same in both: {torch.equal(*everyone)}")
        print(f"test accuracy {100 * accuracy:.1f} %", flush=True)
    dist.barrier()
    del wrapped, terms  # they hold the process group, and it has to be gone before the interpreter is
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(f"{folder}/meeting-point",), nprocs=PROCESSES)
