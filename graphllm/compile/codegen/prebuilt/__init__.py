"""Code of pieces from kernels that were compiled before: an artifact in seconds, without a compiler."""
