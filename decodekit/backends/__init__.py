"""Attention kernels, one file each: how a ``TreeMask`` is lowered and attended with."""
