"""PyTorch modules of PRS-Med that no library ships: the SAM flavour of TinyViT, the prompted mask decoder, the losses.

Shared by the parity fixtures (`scripts/fixtures`) and the PyTorch baseline (`scripts/baseline`), so that both speak of the same arithmetic.
"""
