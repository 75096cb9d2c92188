// gguf_linear with Q6_K: see linear.h and cpu/integers/gguf_formats.h.
#include "linear.h"

GRAPHLLM_GGUF_LINEAR(q6_k, Q6_K)
