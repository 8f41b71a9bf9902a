"""Data sets as arrays: `load` them by name or path, `check` them, split them."""

from protoseam.data.dataset import ArrayDataset, check
from protoseam.data.loading import load
from protoseam.data.split import channel_statistics, stratified_split
from protoseam.data.verification import verify

__all__ = ["ArrayDataset", "channel_statistics", "check", "load", "stratified_split", "verify"]
