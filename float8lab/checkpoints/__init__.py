"""Checkpoint files of every library: readers and writers, and the layouts of FP8 weights in them.

Readers: ``opening`` finds out what a path is, and ``safetensors``, ``pickles``, ``dcp`` and
``megatron`` make a ``CheckpointSource`` of it, whose tensors are read box by box; ``unpickling``
says what a pickle may name. Writers: ``safetensors`` writes the files, and ``replacing`` puts them
in their place. ``layouts`` knows the names and shapes that an FP8 weight and its scales have in a
checkpoint, in both directions; ``packed`` knows those of weights in 4 bits, ``experts`` the
matrices that models stack, and an ``Item`` is a weight, or any other tensor, that was found.
"""
