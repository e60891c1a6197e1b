"""Write checkpoints with FP8 weights for other libraries, and read such checkpoints.

``weights`` finds the bytes that a model's FP8 GEMMs use, ``exporting`` writes them, ``loading``
reads them into a model. ``transformer_engine`` reads TransformerEngine's delayed scales, and
``megatron`` the checkpoints of Megatron-LM's ranks. ``float8lab.checkpoints`` parses the files.
"""
