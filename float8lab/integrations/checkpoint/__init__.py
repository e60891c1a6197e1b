"""Checkpoints with FP8 weights, for other libraries and from them.

``weights`` finds the bytes that a model's FP8 GEMMs use, ``exporting`` writes them, ``loading``
reads them into a model; ``transformer_engine`` reads the scales of another library's delayed
scaling, and ``megatron`` the checkpoints of its ranks. ``float8lab.checkpoints`` knows the files.
"""
