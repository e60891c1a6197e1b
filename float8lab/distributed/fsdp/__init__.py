"""All-gather of FP8 weights under FSDP2: what is sent, and how ranks agree on the scales.

Note: the nouns of this room.

- *unsharded weight*: ``[N, K]``, or ``[E, N, K]`` of E experts, as one process would have it.
- *shard*: a rank's consecutive rows of it, by a ``ShardMap``. The last shards may be shorter or
  empty, and are padded for the all-gather. A ``MasterShard`` is in high precision, a
  ``StoredShard`` in FP8.
- *row shard*: the place of a shard in the unsharded weight and among its blocks. Its *segments* are
  consecutive rows of the shard that have blocks of their own: two if a block crosses its start.
- *sharded parameter*: the DTensor that FSDP2 registers with the module between two forwards; the
  shard is its local tensor. *Owner* of a shard is its sharded parameter.
- *batch*: the weights whose amaxes one all-reduce reduces.

FSDP2 calls ``fsdp_pre_all_gather`` of a shard for what to send, and ``fsdp_post_all_gather`` to
make a weight of what arrived. What is sent is one byte an element, the FP8 data, cast with scales
that every rank already has. They come from the amax of each block of the unsharded weight, so the
gathered bytes are those that one process would have cast.

``weight.py`` knows where shards lie in a weight, and agrees with other ranks on its scales;
``shards.py`` holds the tensors that FSDP2 asks; ``gradients.py`` sends gradients in FP8.
"""

__all__: list[str] = []
