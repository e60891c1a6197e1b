"""A precision plugin that runs Lightning's Trainer and Fabric in FP8, and a callback to watch it.

This module needs the extra ``lightning``; ``import float8lab`` does not load it.
"""

from __future__ import annotations

from float8lab.arguments import needs
from float8lab.integrations.lightning_plugin import LightningPlugin, LightningStats

with needs("float8lab.integrations.lightning", "lightning", "lightning"):
    from lightning.fabric.plugins import Precision as FabricPrecision
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.plugins import Precision as TrainerPrecision

__all__ = ["Float8Precision", "Float8StatsCallback"]


class Float8Precision(LightningPlugin, TrainerPrecision):
    """``LightningPlugin`` for ``lightning.Trainer`` and ``lightning.Fabric``."""

    fabric_base = FabricPrecision
    trainer_base = TrainerPrecision


class Float8StatsCallback(LightningStats, Callback):
    """``LightningStats`` for ``lightning.Trainer``."""
