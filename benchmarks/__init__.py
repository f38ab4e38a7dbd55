"""Benchmarks: ours against memcpy, numpy and a bare pyarrow Flight server, in one run.

Every figure is the median of interleaved rounds, beside its baseline measured in the same rounds: these
ratios hold on noisy machines, absolute figures do not.
"""
