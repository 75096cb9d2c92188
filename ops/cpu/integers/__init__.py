"""Headers of C++ kernels over integer weights; no ops."""
