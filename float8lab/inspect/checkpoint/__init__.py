"""Show the content of checkpoint files with FP8 weights of any origin, and compare two of them.

``float8lab.checkpoints`` reads the tensors, ``measure`` measures each of them, and ``report``,
``page`` and ``difference`` show the result. ``float8lab.inspect`` exports the public names.
"""
