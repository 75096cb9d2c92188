"""Headers of C++ kernels; no ops."""
