"""Predict training steps on many GPUs, and which mesh is the fastest."""
