"""All-gather of FP8 weights under FSDP2: the tensors to send, and agreement on their scales.

Note: the terms used here.

- *unsharded weight*: ``[N, K]``, or ``[E, N, K]`` of E experts, as a single process would have it.
- *shard*: a rank's consecutive rows of the weight, by a ``ShardMap``. The last shards may be
  shorter or empty, and are padded for the all-gather. A ``MasterShard`` is in high precision, a
  ``StoredShard`` in FP8.
- *row shard*: the position of a shard in the unsharded weight and among its blocks. Its *segments*
  are consecutive rows with blocks of their own: two if a block crosses the start of the shard.
- *sharded parameter*: the DTensor that FSDP2 registers with the module between two forwards; the
  shard is its local tensor, and the parameter is the *owner* of the shard.
- *batch*: the weights whose amaxes are reduced by one all-reduce.

FSDP2 calls ``fsdp_pre_all_gather`` of a shard to get the tensors to send, and
``fsdp_post_all_gather`` to make a weight of the gathered ones. A rank sends one byte per element,
the FP8 data, cast with scales that every rank already has. They come from the amax of each block of
the unsharded weight, so the gathered bytes are those that a single process would have cast.

``weight.py`` maps shards to weights and agrees with other ranks on scales; ``shards.py`` has the
tensor classes with FSDP2's hooks; ``gradients.py`` sends gradients in FP8.
"""

__all__: list[str] = []
