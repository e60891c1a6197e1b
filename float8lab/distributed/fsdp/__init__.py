"""All-gather of FP8 weights under FSDP2: what is sent, and how ranks agree on the scales.

FSDP2 cuts a weight ``[N, K]`` into one *shard* of consecutive rows per rank, all of equal size but
the last ones, which may be shorter or empty and are padded for the all-gather. It asks a shard
with the methods ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` what to send and what to make
of what arrived. Here that is one byte an element and nothing else: the FP8 data, cast with scales
that every rank already has. They come from the amax of each block over the *whole* weight, so the
gathered bytes are those that one process would have cast.

``weight.py`` knows where shards lie in a weight, and agrees with other ranks on its scales;
``shards.py`` holds the tensors that FSDP2 asks, and puts them in place.
"""

__all__: list[str] = []
