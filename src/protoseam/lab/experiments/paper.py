"""The published numbers, here and nowhere else: Lampel, Klein and Sager, "ProtoSeam" (tab:*, fig:*).

Accuracies are percentages; seeds are 42, 43, 44, in this order. Constants only: no code, no state.
"""

from __future__ import annotations

SEEDS = (42, 43, 44)
EPOCHS = 200
DATASETS = ("cifar10", "cifar100", "tinyimagenet")
MODELS = ("resnet8", "vit_s")
VARIANTS = ("baseline", "unlifted", "protoseam")

# tab:main: (data set, network, variant) → test accuracy at each seed
TABLE_1: dict[tuple[str, str, str], tuple[float, float, float]] = {
    ("cifar10", "resnet8", "baseline"): (94.88, 95.09, 94.77),
    ("cifar10", "resnet8", "unlifted"): (95.09, 95.38, 95.00),
    ("cifar10", "resnet8", "protoseam"): (95.27, 95.54, 95.57),
    ("cifar10", "vit_s", "baseline"): (89.45, 89.50, 89.34),
    ("cifar10", "vit_s", "unlifted"): (90.55, 89.94, 89.66),
    ("cifar10", "vit_s", "protoseam"): (90.64, 90.34, 90.17),
    ("cifar100", "resnet8", "baseline"): (76.76, 76.96, 76.55),
    ("cifar100", "resnet8", "unlifted"): (74.12, 74.04, 74.55),
    ("cifar100", "resnet8", "protoseam"): (78.18, 78.21, 78.63),
    ("cifar100", "vit_s", "baseline"): (66.11, 65.63, 65.99),
    ("cifar100", "vit_s", "unlifted"): (65.49, 65.38, 64.04),
    ("cifar100", "vit_s", "protoseam"): (70.48, 71.00, 70.12),
    ("tinyimagenet", "resnet8", "baseline"): (63.17, 63.13, 63.25),
    ("tinyimagenet", "resnet8", "unlifted"): (57.70, 58.51, 58.75),
    ("tinyimagenet", "resnet8", "protoseam"): (65.64, 65.48, 65.69),
    ("tinyimagenet", "vit_s", "baseline"): (46.42, 47.45, 47.01),
    ("tinyimagenet", "vit_s", "unlifted"): (48.54, 47.48, 47.76),
    ("tinyimagenet", "vit_s", "protoseam"): (51.71, 51.88, 52.78),
}

# fig:penalty-sweep, ViT-S on CIFAR-100: setting → (mean, above it, below it) over three seeds
SWEEP_RHO: dict[int, tuple[float, float, float]] = {
    1: (60.2467, 0.3233, 0.2667),
    2: (64.0667, 0.1933, 0.1867),
    4: (67.5167, 0.7933, 0.6967),
    8: (69.3267, 0.5633, 0.7267),
    16: (70.4333, 0.7067, 0.7533),
    32: (71.2533, 0.7167, 0.7733),
}
SWEEP_K: dict[int, tuple[float, float, float]] = {
    8: (66.4567, 0.1133, 0.1167),
    16: (69.5233, 0.4467, 0.2333),
    32: (70.4333, 0.7067, 0.7533),
    64: (70.9700, 0.6900, 0.4100),
    128: (71.1800, 0.1500, 0.2600),
}

# tab:hyperparameters: (data set, network) → (learning rate, weight decay) of each variant. Unlifted was not tuned: it
# has Baseline's (rem:confound).
TUNED: dict[tuple[str, str], dict[str, tuple[float, float]]] = {
    ("cifar10", "resnet8"): {"baseline": (0.02, 1e-3), "protoseam": (0.05, 5e-4)},
    ("cifar10", "vit_s"): {"baseline": (0.02, 1e-4), "protoseam": (0.01, 5e-4)},
    ("cifar100", "resnet8"): {"baseline": (0.05, 2e-3), "protoseam": (0.02, 2e-3)},
    ("cifar100", "vit_s"): {"baseline": (0.01, 1e-4), "protoseam": (0.01, 5e-4)},
    ("tinyimagenet", "resnet8"): {"baseline": (0.05, 1e-3), "protoseam": (0.02, 2e-3)},
    ("tinyimagenet", "vit_s"): {"baseline": (0.1, 2e-4), "protoseam": (0.01, 5e-4)},
}

# §tech_details: the grid of the hyperparameter search, for Baseline and ProtoSeam, every data set and network
GRID: dict[str, tuple[float, ...]] = {
    "optim.lr": (0.01, 0.02, 0.05, 0.1),
    "optim.weight_decay": (1e-4, 2e-4, 5e-4, 1e-3, 2e-3),
}

# fig:tin-vit-training-curves: mean validation accuracy of the seeds after every fifth epoch
CURVES: dict[tuple[str, str, str], tuple[float, ...]] = {
    ("tinyimagenet", "vit_s", "baseline"): (
        15.377, 22.040, 27.060, 23.473, 27.603, 26.383, 27.310, 32.287, 30.413, 32.063,
        32.540, 33.633, 33.833, 36.143, 33.937, 34.750, 37.587, 37.180, 38.200, 37.147,
        38.993, 39.970, 40.137, 40.713, 41.263, 42.067, 43.537, 43.573, 43.933, 44.573,
        45.240, 45.780, 45.953, 46.637, 46.727, 47.150, 47.307, 47.567, 47.593, 47.707,
    ),
    ("tinyimagenet", "vit_s", "unlifted"): (
        13.493, 19.263, 22.637, 24.623, 22.983, 25.213, 25.533, 25.247, 26.083, 27.090,
        27.200, 27.537, 30.983, 31.217, 29.297, 32.267, 31.803, 34.147, 32.630, 33.813,
        35.020, 35.460, 37.513, 37.967, 38.643, 40.720, 39.927, 41.557, 42.433, 43.353,
        44.253, 44.913, 45.567, 46.227, 46.800, 47.073, 47.150, 47.713, 47.750, 47.777,
    ),
    ("tinyimagenet", "vit_s", "protoseam"): (
        7.083, 10.567, 13.117, 14.983, 18.393, 19.937, 21.890, 23.867, 24.377, 27.043,
        27.510, 29.060, 30.920, 31.737, 32.530, 33.337, 35.260, 36.657, 37.317, 39.367,
        39.853, 41.237, 41.797, 43.937, 43.890, 44.673, 46.433, 46.970, 47.527, 48.453,
        49.350, 49.760, 50.140, 50.670, 51.253, 51.580, 52.173, 52.200, 52.263, 52.353,
    ),
}  # fmt: skip
