"""The readable reference of every operation of the kernel table: plain torch, complete, any device.

Invariance (the one property every backend must have): each output row is a function of its own inputs only, bit for bit.
torch's matrix products choose blocking, and with it the order of summation, by the number of rows. So here every
product has a constant shape: rows are processed in tiles of a fixed count, the last one padded with zeros. Elementwise
operations and reductions over axes of fixed length do not depend on the other rows (torch.sigmoid does: see elementwise).
"""

from sglang.srt.kernels.torch_backend import attention, engram, hyper_connections, indexer, linear, moe, norm, rotary

__all__ = ["attention", "engram", "hyper_connections", "indexer", "linear", "moe", "norm", "rotary"]
