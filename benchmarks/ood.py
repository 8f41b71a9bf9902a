"""Out-of-distribution scores: the seam's own beside Energy, MSP and pytorch-ood's detectors on the embedding.

    python benchmarks/ood.py digits --out results/ood/digits.json       about 5 min on one CPU core
    python benchmarks/ood.py cifar RUN … --device cuda --out results/ood/cifar10-cifar100.json

``digits``: each digit in turn is left out of training; a small CNN learns the other nine, once by cross-entropy and
once lifted. Its test images of the nine stand against all images of the tenth.

``cifar``: finished runs on CIFAR-10 (their directories with checkpoints, any variant) against CIFAR-100's test images,
normalised as CIFAR-10's were (``--outside`` names them, or a path to them). No class of CIFAR-100 is one of CIFAR-10's.

Scores are larger for what is less like the training data. MSP is 1 − max softmax (Hendrycks & Gimpel 2017), Energy is
−logsumexp of the logits (Liu et al. 2020), seam is ``net.score_ood``. Mahalanobis (Lee et al. 2018), RMD (Ren et al.
2021) and KNN (Sun et al. 2022) are pytorch-ood's, fitted to the embeddings of the training data: N1's for a lifted
network, what the last Linear reads for any other. AUROC is the chance that an outlier scores higher than an inlier.
FPR95 is the share of outliers below the threshold that 95 % of the inliers are below; lower is better.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import protoseam as ps
from protoseam.lab.data.loading import load
from protoseam.lab.engine.evaluate import load_network
from protoseam.lab.engine.rundata import load_again
from protoseam.lab.engine.rundir import RunDirectory, environment
from protoseam.lab.experiments.audit import rebuild
from protoseam.lab.pipeline.augment import normalise
from protoseam.seam.classifier import find_classifier

EPOCHS = 15
SEEDS = (0, 1, 2)


def metrics(inside: Tensor, outside: Tensor) -> dict[str, float]:
    truth = np.r_[np.zeros(len(inside)), np.ones(len(outside))]
    threshold = inside.double().quantile(0.95)
    return {
        "auroc": 100 * float(roc_auc_score(truth, torch.cat([inside, outside]).double().cpu().numpy())),
        "fpr95": 100 * float((outside <= threshold).double().mean()),
    }


@torch.no_grad()
def over(function: Callable[[Tensor], Tensor], batches: Iterable[Tensor]) -> Tensor:
    return torch.cat([function(x).detach() for x in batches])


def all_scores(
    logits: Callable[[Tensor], Tensor],
    embed: Callable[[Tensor], Tensor],
    seam: Callable[[Tensor], Tensor] | None,
    train: Callable[[], Iterable[tuple[Tensor, Tensor]]],
    inside: list[Tensor],
    outside: list[Tensor],
) -> dict[str, dict[str, float]]:
    """The metrics of each score: of functions of the logits, of the embedding, and of the seam if there is one."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    out = [over(logits, x) for x in (inside, outside)]
    found["MSP"] = tuple(1 - v.double().softmax(1).amax(1) for v in out)
    found["Energy"] = tuple(-v.double().logsumexp(1) for v in out)
    if seam is not None:
        found["seam"] = tuple(over(seam, x) for x in (inside, outside))
    try:
        from pytorch_ood.detector import KNN, RMD, Mahalanobis
    except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision that does not match torch
        print(f"Mahalanobis, RMD and KNN are left out: pytorch-ood cannot be imported ({error})")
    else:
        pairs = list(train())
        z, y = over(embed, (x for x, _ in pairs)).float(), torch.cat([y for _, y in pairs])
        features = [over(embed, v).float() for v in (inside, outside)]
        for name, kind in {"Mahalanobis": Mahalanobis, "RMD": RMD, "KNN": KNN}.items():
            device = torch.device("cpu") if kind is KNN else z.device  # scikit-learn searches the neighbours
            detector = kind(None).to(device).fit_features(z.to(device), y.to(device))
            found[name] = tuple(detector.predict_features(v.to(device)) for v in features)
    return {name: metrics(*pair) for name, pair in found.items()}


# ------------------------------------------------------------------------------------------ digits


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 9),
    )  # fmt: skip


def cross_entropy(loader: DataLoader[Any]) -> nn.Sequential:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.eval()


def lifted(loader: DataLoader[Any]) -> ps.Lifted:
    net = ps.lift(network(), num_classes=9)
    optimizer = torch.optim.AdamW(net.param_groups(lr=1e-3))
    for _ in net.epochs(loader, EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            net.objective(x, y).total.backward()
            optimizer.step()
    return net.eval()


def digits() -> list[dict[str, Any]]:
    data = load_digits()
    x = torch.tensor(data.images[:, None] / 16, dtype=torch.float32)
    label = torch.tensor(data.target)
    rows = []
    for held_out in range(10):
        outside = x[label == held_out]
        kept = label != held_out
        x_in, y_in = x[kept], label[kept] - (label[kept] > held_out).long()
        for seed in SEEDS:
            torch.manual_seed(seed)
            order = torch.randperm(len(y_in))
            first, rest = order[:1200], order[1200:]
            loader = DataLoader(TensorDataset(x_in[first], y_in[first]), batch_size=64, shuffle=True)
            inside = [x_in[rest]]

            def clean(
                first: Tensor = first, x: Tensor = x_in, y: Tensor = y_in
            ) -> list[tuple[Tensor, Tensor]]:
                return [(x[first], y[first])]

            plain, net = cross_entropy(loader), lifted(loader)
            for trained, model, embed, seam in (
                ("cross-entropy", plain, plain[:-1], None),
                ("lifted", net, net.embed, net.score_ood),
            ):
                accuracy = (over(model, inside).argmax(1) == y_in[rest]).double().mean()
                row = {
                    "held_out": held_out,
                    "seed": seed,
                    "trained": trained,
                    "accuracy": 100 * float(accuracy),
                }
                rows.append({**row, "scores": all_scores(model, embed, seam, clean, inside, [outside])})
                print(json.dumps(rows[-1]), flush=True)
    return rows


# ------------------------------------------------------------------------------------------ CIFAR


def cifar(
    runs: list[Path], outside_data: str, root: Path | None, device: torch.device
) -> list[dict[str, Any]]:
    others = load(outside_data, root)
    images = torch.tensor(np.asarray(others.test_images)).permute(0, 3, 1, 2).to(device)
    rows = []
    for run in runs:
        config = RunDirectory(run).read_config()
        seam = None
        if config.variant == "protoseam":
            _, net, data = rebuild(run, config, device)
            model, embed, seam = net, net.embed, net.score_ood
        else:
            data = load_again(run, config, device)
            model = load_network(run, data, fold=True).to(device)
            embed = before(model, data.num_classes)
        outside = [normalise(part, data.mean, data.std, data.dtype) for part in images.split(1000)]
        pairs = [(x, y) for x, y in data.batches("test")]
        inside = [x for x, _ in pairs]
        accuracy = (over(model, inside).argmax(1) == torch.cat([y for _, y in pairs])).double().mean()
        row = {
            "run": run.name,
            "seed": config.seed,
            "trained": config.variant,
            "accuracy": 100 * float(accuracy),
        }
        scores = all_scores(model, embed, seam, data.clean, inside, outside)
        rows.append({**row, "model": config.model, "epochs": config.epochs, "scores": scores})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def before(model: nn.Module, num_classes: int) -> Callable[[Tensor], Tensor]:
    """What the last Linear reads."""
    layer = model.get_submodule(find_classifier(model, num_classes))
    seen: list[Tensor] = []
    layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))

    def embed(x: Tensor) -> Tensor:
        seen.clear()
        model(x)
        return seen[0]

    return embed


def means(rows: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Mean ± standard deviation over the rows, for each way of training and score."""
    groups: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    for row in rows:
        for name, values in row["scores"].items():
            groups[row["trained"], name].append(values)
    table: dict[str, dict[str, str]] = {}
    for (trained, name), values in groups.items():
        columns = {}
        for metric in ("auroc", "fpr95"):
            of = [value[metric] for value in values]
            columns[metric] = f"{statistics.mean(of):.1f} ± {statistics.stdev(of) if len(of) > 1 else 0:.1f}"
        table[f"{trained}, {name}"] = columns
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", choices=("digits", "cifar"))
    parser.add_argument("runs", type=Path, nargs="*", help="directories of runs on CIFAR-10")
    parser.add_argument("--outside", default="cifar100", help="the other data, by name or path")
    parser.add_argument("--data_root", type=Path, help="where data sets by name lie")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.data == "digits":
        rows = digits()
    else:
        rows = cifar(args.runs, args.outside, args.data_root, torch.device(args.device))
    table = means(rows)
    for name, columns in table.items():
        print(f"{name:<28}AUROC {columns['auroc']:>13}   FPR95 {columns['fpr95']:>13}")
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        result = {"environment": environment(args.device), "means": table, "rows": rows}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
