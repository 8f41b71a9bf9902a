"""Data sets as arrays: `load` them by name or path, `check` them, split them."""

from protoseam.lab.data.dataset import ArrayDataset, check
from protoseam.lab.data.loading import load, verify
from protoseam.lab.data.split import channel_statistics, stratified_split

__all__ = ["ArrayDataset", "channel_statistics", "check", "load", "stratified_split", "verify"]
