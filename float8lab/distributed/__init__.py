"""Tools that run across processes, and tools that a training loop wraps around layers.

They gather sharded weights and reduce-scatter gradients in FP8, send tokens to experts, broadcast
models and save checkpoints. They also recompute and offload activations, fork random streams, bind
backward to a core, shard the cross entropy's vocabulary, and sum sequence-parallel gradients.
"""

from float8lab.distributed.affinity import backward_on_this_core
from float8lab.distributed.broadcast import broadcast_parameters
from float8lab.distributed.checkpoint import ModelState
from float8lab.distributed.comm import reduce_sequence_parallel_gradients
from float8lab.distributed.context_parallel import (
    CPAttentionLoadBalancingStrategy,
    get_batch_on_this_cp_rank,
    join_sequence,
    shard_sequence,
)
from float8lab.distributed.cross_entropy import parallel_cross_entropy
from float8lab.distributed.expert_parallel import DispatchHandle, moe_combine, moe_dispatch
from float8lab.distributed.fsdp.gradients import Float8ReduceScatter, fp8_reduce_scatter
from float8lab.distributed.fsdp.weight import requantize_shards_
from float8lab.distributed.offload import get_cpu_offload_context
from float8lab.distributed.random import CudaRNGStatesTracker

__all__ = [
    "CPAttentionLoadBalancingStrategy", "CudaRNGStatesTracker", "DispatchHandle",
    "Float8ReduceScatter", "ModelState", "backward_on_this_core", "broadcast_parameters",
    "fp8_reduce_scatter", "get_batch_on_this_cp_rank", "get_cpu_offload_context", "join_sequence",
    "moe_combine", "moe_dispatch", "parallel_cross_entropy", "reduce_sequence_parallel_gradients",
    "requantize_shards_", "shard_sequence",
]  # fmt: skip
