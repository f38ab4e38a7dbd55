"""The same payloads through arrow-tq and through the systems that people use for the same job.

Each system runs as its users run it: its own servers, a producer process and a consumer process. What
comes back is compared with what went in, value by value. ``python -m benchmarks.peers`` prints the table.
"""
