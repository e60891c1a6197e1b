"""Checkpoint files of every library: readers and writers, and the layouts of FP8 weights in them.

Readers: ``opening`` finds out what a path is, and ``safetensors``, ``pickles`` and ``dcp`` make a
``source`` of it, whose tensors are read box by box. Writers: ``safetensors`` writes the files, and
``replacing`` puts them in their place. ``layouts`` knows by which names and shapes an FP8 weight
and its scales lie in a checkpoint, in both directions; ``packed`` knows those of weights in 4 bits,
``experts`` the matrices that models stack, and an ``item`` is what is found.
"""
