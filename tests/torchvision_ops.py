"""Import it before torchvision, whose published wheels fail on import beside a CPU build of torch.

The operators of their extension are then not registered. Declaring the two schemas that torchvision patches is enough
for datasets, transforms and models, which is all the tests use. Beside a CUDA build they register themselves, and a
second declaration would end the process.
"""

from __future__ import annotations

import importlib.util

import torch

if torch.version.cuda is None and importlib.util.find_spec("torchvision"):
    LIBRARY = torch.library.Library("torchvision", "DEF")
    LIBRARY.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    LIBRARY.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
