"""Kernels tried and timed that the library does not use."""
