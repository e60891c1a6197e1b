"""Optimizers for models whose weights are stored in FP8."""

from float8lab.optim.master_weights import MasterWeights

__all__ = ["MasterWeights"]
