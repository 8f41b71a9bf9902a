"""Each Triton kernel against the plain function it equals, on a CPU through Triton's interpreter.

Run by `test_kernels.py` in a process of its own: the interpreter is chosen when a kernel is defined.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor, nn
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from protoseam import core
from protoseam.core import kernels as core_kernels
from protoseam.core.merging import merge_batch_
from protoseam.lab.engine import optim, step
from protoseam.lab.kernels import augment as augment_kernels
from protoseam.lab.kernels import fused_resnet, fused_vit
from protoseam.lab.kernels import step as step_kernels
from protoseam.lab.kernels.sums import column_sums
from protoseam.lab.models import vit_s
from protoseam.lab.pipeline import augment as pipeline
from protoseam.lab.pipeline.augment import Augmentation, Erase, augment, augment_with
from protoseam.lab.pipeline.randaugment import OPS, RandAugment

# numpy warns of 0/0 in lanes that a mask then drops
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
torch.backends.mkldnn.enabled = False  # bf16 products by plain loops, on any processor


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    honest = InterpreterBuilder.create_dot

    def valued(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def dot(self: Any, a: Any, b: Any, *more: Any) -> Any:
        """Triton 3.9's interpreter multiplies the bits of bf16 numbers; this multiplies their values."""
        return honest(self, valued(a), valued(b), *more)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


# ---------------------------------------------------------------------- the library's two


@pytest.mark.parametrize(("classes", "width"), [(7, 5), (40, 32)])
def test_repulsion(classes: int, width: int) -> None:
    s = 0.3 * torch.randn(classes, width)
    s[1] = s[0]  # coincident: no gradient between the two
    plain = s.clone().requires_grad_()
    expected = core.repulsion(plain, 1.3)
    value, gradient = core_kernels.repulsion(s, 1.3)
    torch.testing.assert_close(value.float(), expected.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, plain)[0])


@pytest.mark.parametrize("windows", [(25.1, 32 / 3), (1e9, float("inf"))])
def test_merge_batch(windows: tuple[float, float]) -> None:
    window, mean_window = windows
    plain, found = (core.empty_moments(6, 5, "full") for _ in "ab")
    for _ in range(3):
        z, y = 2 + torch.randn(19, 5), torch.randint(0, 5, (19,))  # class 5 never comes
        merge_batch_(plain, z, y, window=window, mean_window=mean_window)
        core_kernels.merge_batch(*found, z, y, window, mean_window)
    for a, b in zip(plain, found, strict=True):
        # Triton before 3.9 passes the windows as float32
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-8)


# ---------------------------------------------------------------------- the step's


@pytest.mark.parametrize("counter", [0, 7, 19])
def test_take_batch(counter: int) -> None:
    images = torch.randn(40, 3, 5, 5).to(memory_format=torch.channels_last)
    labels, rates, at = torch.randperm(40), torch.rand(20), torch.tensor([counter])
    x, y, lr = torch.empty_like(images[:8]), torch.empty_like(labels[:8]), torch.zeros(1)
    step_kernels.take_batch(images, labels, rates, at, x, y, lr, 5)
    expected = step.take_batch(images, labels, rates, at, 8, 5)
    assert all(map(torch.equal, (x, y, lr), expected))


@pytest.mark.parametrize("keep_going", [True, False])
@pytest.mark.parametrize(
    ("loss", "flag", "bad"),
    [(1.0, 0, 0), (float("nan"), 0, 0), (float("-inf"), 0, 2), (1.0, 1, 0), (1.0, 0, 2)],
)
def test_keep_books(loss: float, flag: int, bad: int, keep_going: bool) -> None:
    def books() -> list[Tensor]:
        flags = [torch.tensor([flag], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)]
        return [*flags, torch.ones(3), torch.tensor([bad]), torch.tensor([-1]), torch.tensor([5])]

    losses, plain, found = torch.tensor([loss, 2.0, 3.0]), books(), books()
    step.keep_books(losses, *plain, keep_going=keep_going)
    step_kernels.keep_books(losses, *found, keep_going=keep_going)
    assert [t.tolist() for t in found] == [t.tolist() for t in plain]


@pytest.mark.parametrize("low", [None, torch.bfloat16])
@pytest.mark.parametrize("ok", [None, 0, 1])
def test_sgd_update(low: torch.dtype | None, ok: int | None) -> None:
    master, velocity, grad = torch.randn(3, 3000).unbind(0)
    grad = grad.to(low or torch.float32)
    flag = None if ok is None else torch.tensor([ok], dtype=torch.int32)
    both = []
    for update in (optim.sgd_update, step_kernels.sgd_update):
        p, v = master.clone(), velocity.clone()
        work = p if low is None else p.to(low)
        update(p, v, grad, work, torch.tensor([0.1]), flag, 0.5, 0.9, 0.01)
        both.append((p, v, work))
    for a, b in zip(*both, strict=True):
        torch.testing.assert_close(a, b)
    assert torch.equal(both[1][0], master) == (ok == 0)


def test_gradients_left_where_they_are() -> None:
    """`Scattered` against a gathered update; the tables have a block of whole length, and one beyond."""
    sizes, offsets = [100, 2048, 2500], [0, 128, 2176]
    grads = [torch.randn(size) for size in sizes]
    table = step_kernels.Scattered(sizes, offsets, torch.float32, torch.device("cpu"))
    table.addresses.copy_(torch.tensor([g.data_ptr() for g in grads]))
    flag, ok, lr = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32), torch.tensor([0.1])
    table.check(flag)
    assert int(flag) == 0
    master, velocity, flat = torch.randn(4736), torch.randn(4736), torch.zeros(4736)
    for g, offset in zip(grads, offsets, strict=True):
        flat[offset : offset + len(g)] = g
    plain = [master.clone(), velocity.clone()]
    optim.sgd_update(*plain, flat, plain[0], lr, ok, 0.5, 0.9, 0.01)
    inside = flat != 0  # the gaps between parameters are not touched
    table.update(master, velocity, master, lr, ok, 0.5, 0.9, 0.01)
    for a, b in zip((master, velocity), plain, strict=True):
        torch.testing.assert_close(a[inside], b[inside])
    grads[2][2499] = torch.nan
    table.check(flag)
    assert int(flag) == 1


# ---------------------------------------------------------------------- augmentation, to the bit


@pytest.mark.parametrize("shape", [(3, 8, 12), (1, 8, 8)])
def test_every_operation_of_randaugment(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    count = 2 * len(OPS)
    levels = torch.randint(0, 256, (count, *shape), dtype=torch.uint8).contiguous(
        memory_format=torch.channels_last
    )
    levels[::3] //= 4
    op, negative = torch.arange(count) % len(OPS), torch.arange(count) >= len(OPS)
    draw = pipeline.draw_parameters

    def drawn(*args: Any, **options: Any) -> Any:
        return draw(*args, **options)._replace(op_SB=op[None], negative_SB=negative[None])

    monkeypatch.setattr(pipeline, "draw_parameters", drawn)
    policy = Augmentation(crop_padding=2, randaugment=RandAugment(num_ops=1), erase=Erase(value=-1.5))
    rows = torch.randperm(count)
    how: dict[str, Any] = {"policy": policy, "seed": 3, "epoch": 2}
    how |= {"mean": [0.49, 0.47, 0.45][: shape[0]], "std": [0.25, 0.24, 0.26][: shape[0]]}
    out = torch.empty(levels.shape, memory_format=torch.channels_last)
    augment_with(augment_kernels, out, levels, rows, **how)
    assert torch.equal(out, augment(levels[rows], rows, **how))


# ---------------------------------------------------------------------- the networks'


def test_column_sums() -> None:
    part = torch.randn(3, 150, 40)
    torch.testing.assert_close(column_sums(part, torch.float32), part.sum(1))


def near(found: Tensor, expected: Tensor, share: float = 0.01) -> None:
    """bf16 has eight bits: an element may be off by rounding, the whole by little."""
    assert (found.float() - expected.float()).norm() <= share * expected.float().norm()


@pytest.mark.parametrize("kind", ["alone", "residual", "two norms"])
def test_a_normalised_activation_and_its_gradients(kind: str) -> None:
    n, c, side = 4, 64, 8
    bn, bn2 = nn.BatchNorm2d(c), nn.BatchNorm2d(c)
    x, other = (2 + torch.randn(n, c, side, side).to(memory_format=torch.channels_last) for _ in "ab")
    dy = torch.randn_like(x)
    norms = [fused_resnet._Norm(m) for m in (bn, bn2)]
    low = [t.bfloat16().detach().requires_grad_() for t in (x, other)]
    spec = fused_resnet._Spec(norms[0], norms[1] if kind == "two norms" else None, "nothing")
    own = [bn.weight, bn.bias, *([bn2.weight, bn2.bias] if kind == "two norms" else [])]
    res, x2 = (low[1] if kind == "residual" else None), (low[1] if kind == "two norms" else None)
    y = fused_resnet._Activation.apply(spec, low[0], res, x2, *own)
    fused_statistics = bn.running_mean.clone(), bn.running_var.clone()
    wanted = [low[0], *([low[1]] if kind != "alone" else []), *own]
    found = [g.clone() for g in torch.autograd.grad(y, wanted, dy.bfloat16())]
    bn.reset_running_stats()
    bn2.reset_running_stats()
    full = [t.detach().float().requires_grad_() for t in low]
    sum_ = bn(full[0]) + {"alone": 0.0, "residual": full[1], "two norms": bn2(full[1])}[kind]
    expected = torch.autograd.grad(
        sum_.relu(), [full[0], *([full[1]] if kind != "alone" else []), *own], dy.bfloat16().float()
    )
    near(y, sum_.relu())
    for a, b in zip(found, expected, strict=True):
        near(a, b, 0.02)
    torch.testing.assert_close(fused_statistics, (bn.running_mean, bn.running_var), rtol=1e-3, atol=1e-3)


def test_a_stem_and_its_gradients() -> None:
    conv, bn = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64)
    conv.to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 16, 16).to(memory_format=torch.channels_last).bfloat16()
    weight = conv.weight.detach().bfloat16().requires_grad_()
    y, again = fused_resnet._Stem.apply(fused_resnet._Norm(bn), x, weight, bn.weight, bn.bias)
    dy = torch.randn(y.shape).bfloat16()
    found = torch.autograd.grad([y, again], [weight, bn.weight, bn.bias], [dy, dy])
    bn.reset_running_stats()
    full = weight.detach().float().requires_grad_()
    plain = bn(F.conv2d(x.float(), full, padding=1)).relu()
    near(y, plain)
    assert torch.equal(y, again)
    for a, b in zip(
        found, torch.autograd.grad(plain, [full, bn.weight, bn.bias], 2 * dy.float()), strict=True
    ):
        near(a, b, 0.03)


def test_a_vision_transformer_and_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_vit.launch, "_shared_memory", lambda t: 0)
    monkeypatch.setattr(fused_vit.launch, "_stages", lambda t: 3)
    model = vit_s(10, image_size=32, dim=128, depth=1, heads=4, mlp=128)
    x = torch.randn(2, 3, 32, 32).bfloat16()
    low = vit_s(10, image_size=32, dim=128, depth=1, heads=4, mlp=128).bfloat16()
    low.load_state_dict(model.state_dict())
    model.load_state_dict(low.state_dict())
    low.fused = fused_vit.FusedViT(low)
    fused, plain = low.features(x), model.features(x.float())
    near(fused, plain, 0.02)
    d = torch.randn_like(plain).bfloat16()
    fused.backward(d)
    plain.backward(d.float())
    for (name, a), b in zip(low.named_parameters(), model.parameters(), strict=True):
        if b.grad is not None:
            assert a.grad is not None, name
            near(a.grad, b.grad, 0.05)
