"""All-gather of FP8 weights under FSDP2: what is sent, and how ranks agree on the scales.

FSDP2 cuts a weight ``[N, K]`` into one *shard* of consecutive rows per rank, all of equal size but
the last ones, which may be shorter or empty and are padded for the all-gather. It asks a shard
with the methods ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` what to send and what to make
of what arrived. Here that is one byte an element and nothing else: the FP8 data, cast with scales
that every rank already has. They come from the amax of each block over the *whole* weight, so the
gathered bytes are those that one process would have cast.

``layout.py`` says where a shard lies in its weight, ``weight.py`` keeps the scales that the ranks
share, ``shards.py`` holds the tensors that FSDP2 asks, ``module.py`` puts these in place, and
``rewrite.py`` writes to weights that are stored in FP8.
"""

from float8lab.distributed.fsdp.layout import local_of, shard_mesh
from float8lab.distributed.fsdp.module import (
    Shardable,
    is_sharded_plain,
    is_tensor_parallel,
    reshard,
    sharded_by_fsdp,
)
from float8lab.distributed.fsdp.rewrite import requantize_shards_
from float8lab.distributed.fsdp.shards import MasterShard, layout_of, settle
from float8lab.distributed.fsdp.weight import (
    ShardedWeight,
    WeightCast,
    cast_stored,
    reduced_amaxes,
)

__all__ = [
    "MasterShard",
    "Shardable",
    "ShardedWeight",
    "WeightCast",
    "cast_stored",
    "is_sharded_plain",
    "is_tensor_parallel",
    "layout_of",
    "local_of",
    "reduced_amaxes",
    "requantize_shards_",
    "reshard",
    "settle",
    "shard_mesh",
    "sharded_by_fsdp",
]
