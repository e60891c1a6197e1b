"""Checkpoints with FP8 weights of any origin: their content, and the difference of two.

``float8lab.checkpoints`` reads the tensors; ``measure`` looks at each of them; ``report``, ``page``
and ``difference`` show the result. ``float8lab.inspect`` has the names.
"""
