"""The GPU kernels of the Spark block, each with its reference in mx ops."""
