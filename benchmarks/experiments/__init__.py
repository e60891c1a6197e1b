"""Kernels that were tried and timed, and that the library does not use."""
