"""Measurements and tests that need a GPU, for `scripts/gpu-check`."""
