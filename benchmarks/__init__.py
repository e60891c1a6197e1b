"""Measurements; run them from the repository root.

    python -m benchmarks                        all subjects, and rewrite RESULTS.md
    python -m benchmarks --only gemm,linear     some
    python -m benchmarks.linear --compile       one, with its own options (--help)

=========== ====================================================================================
gemm        the GEMMs of a linear layer alone, by granularity and accumulation
quantize    the ops that cast
linear      a linear layer, forward and backward
grouped     ``GroupedLinear``, experts of a mixture; prints, not among "all" yet
norm_linear ``LayerNormLinear``
mlp         ``LayerNormMLP``
attention   torch's backends and FP8 attention
layer       a Llama-3-8B decoder layer
model       training steps of 8 of them
overhead    what calls cost the CPU, and how many kernels they launch
path        how many functions a call enters, and how large the package is; prints; needs no GPU
memory      what a layer and a stack hold, and whether many steps need more
saving      what ``save`` of a recipe costs and frees in a compiled layer; prints
power       joules a step and a token of a decoder layer
accuracy    SQNR of a linear layer; needs no GPU
advise      how far the steps that ``float8lab.inspect.advise`` predicts are from measured ones
fsdp        sharded training steps, by torchrun on several GPUs
links       what a GPU sends to others, by torchrun; prints
offload     CPU offload of activations; not among "all"
watch       what ``float8lab.inspect.watch`` costs; prints, and is in docs/watch.md
pretrain    a Llama of a billion parameters from scratch, run by run; prints loss gaps and tokens/s
moments     FP8 moments of AdamW: their cost in loss, and bytes of each combination; prints
scale       how far predicted steps are from the rows of RESULTS.md; prints; needs no GPU
report_page how fast the report of a large run opens in a browser; prints; needs no GPU
=========== ====================================================================================

A subject is a module with a ``SUBJECT`` (``report.py``), which yields one ``Row`` for each
candidate of each case. Every candidate is compared with a reference first, and a wrong answer is
shown in place of a time. bfloat16 is in every run, as the baseline of ``x bf16``; torchao and
TransformerEngine are where they are installed (``peers.py``). The floor of a row (``floor.py``) is
its GEMMs alone and the bytes that must move at the bandwidth of a copy, both measured in the same
run by the same timer.

``--json FILE`` appends each row as soon as it is measured, ``--plot DIR`` saves bars against the
floor. Without ``--compile``, what is compiled is bfloat16 in ``layer``, ``model`` and ``memory``,
and nothing else. RESULTS.md holds the tables between comments, and remarks around them; NOTES.md
what was expected, and what came out.

To add a subject: a module with ``rows(setting, ...)``, its ``SUBJECT`` and ``main``, its name in
``__main__.SUBJECTS``, and a test that runs it on a CPU with tiny sizes.
"""
