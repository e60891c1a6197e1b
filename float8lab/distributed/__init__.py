"""What runs across processes: FP8 all-gather of sharded weights, broadcast, checkpoints."""

from float8lab.distributed.broadcast import broadcast_parameters
from float8lab.distributed.checkpoint import ModelState
from float8lab.distributed.fsdp import requantize_shards_

__all__ = ["ModelState", "broadcast_parameters", "requantize_shards_"]
