"""Benchmarks of float8lab; run them from the repository root.

    python -m benchmarks                        all subjects, and rewrite RESULTS.md
    python -m benchmarks --only gemm,linear     some subjects
    python -m benchmarks.linear --compile       one subject, with its own options (--help)

=========== ====================================================================================
gemm        only the GEMMs of a linear layer, by granularity and accumulation
quantize    the ops that cast
linear      a linear layer, forward and backward
grouped     ``GroupedLinear``, the linear layers of MoE experts
norm_linear ``LayerNormLinear``
mlp         ``LayerNormMLP``
attention   torch's backends and FP8 attention
layer       a Llama-3-8B decoder layer
model       training steps of 8 of them
overhead    the CPU time of calls, and how many kernels they launch
compiling   the CPU time of the first compiled step of linear layers; prints; needs no GPU
path        functions that a call enters, and the size of the package; prints; needs no GPU
memory      the memory of a layer and of a stack, and whether many steps need more
saving      the cost and the freed memory of a recipe's ``save`` in a compiled layer; prints
power       joules a step and a token of a decoder layer
accuracy    SQNR of a linear layer; needs no GPU
advise      the error of the steps that ``float8lab.inspect.advise`` predicts
fsdp        sharded training steps, by torchrun on several GPUs
links       the rate at which a GPU sends to others, by torchrun; prints
offload     CPU offload of activations; not among "all"
watch       the cost of ``float8lab.inspect.watch``; prints, and is in docs/watch.md
pretrain    a Llama of a billion parameters from scratch, run by run; prints loss gaps and tokens/s
moments     FP8 moments of AdamW: the cost in loss, and bytes of each combination; prints
scale       the error of predicted steps against rows of RESULTS.md; prints; needs no GPU
report_page how fast the report of a large run opens in a browser; prints; needs no GPU
=========== ====================================================================================

A subject is a module with a ``SUBJECT`` (``report.py``), which yields one ``Row`` for each
candidate of each case. Every candidate is compared with a reference first, and a wrong answer is
shown in place of a time. bfloat16 is in every run as the baseline of ``x bf16``; torchao and
TransformerEngine are measured if they are installed (``peers.py``). The floor of a row
(``floor.py``) is the time of its GEMMs alone, plus that of the bytes that must move at the
bandwidth of a copy; the same timer measures both in the same run.

``--json FILE`` appends each row as soon as it is measured, ``--plot DIR`` saves bars against the
floor. Without ``--compile``, only bfloat16 in ``layer``, ``model`` and ``memory`` is compiled.
RESULTS.md has the tables between comments, and remarks around them; NOTES.md has what was expected
and what was measured.

To add a subject, write a module with ``rows(setting, ...)``, ``SUBJECT`` and ``main``, add its name
to ``__main__.SUBJECTS``, and write a test that runs it on a CPU with tiny sizes.
"""
