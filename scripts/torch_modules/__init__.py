"""PyTorch modules of PRS-Med that no library provides: SAM's variant of TinyViT, the prompted mask decoder, the losses.

The parity fixtures (`scripts/fixtures`) and the PyTorch baseline (`scripts/baseline`) share them, so that both use the
same arithmetic.
"""
