"""Float8Precision for programs that import ``pytorch_lightning`` or ``lightning_fabric``.

This module needs pytorch-lightning; ``import float8lab`` does not load it.
"""

from __future__ import annotations

from float8lab.arguments import needs
from float8lab.integrations.lightning_plugin import LightningPlugin, LightningStats

with needs("float8lab.integrations.pytorch_lightning", "pytorch-lightning"):
    from lightning_fabric.plugins import Precision as FabricPrecision
    from pytorch_lightning.callbacks import Callback
    from pytorch_lightning.plugins import Precision as TrainerPrecision

__all__ = ["Float8Precision", "Float8StatsCallback"]


class Float8Precision(LightningPlugin, TrainerPrecision):
    """``LightningPlugin`` for ``pytorch_lightning.Trainer`` and ``lightning_fabric.Fabric``."""

    fabric_base = FabricPrecision
    trainer_base = TrainerPrecision


class Float8StatsCallback(LightningStats, Callback):
    """``LightningStats`` for ``pytorch_lightning.Trainer``."""
