// gguf_linear with Q5_K: see linear.h and cpu/integers/gguf_formats.h.
#include "linear.h"

GRAPHLLM_GGUF_LINEAR(q5_k, Q5_K)
