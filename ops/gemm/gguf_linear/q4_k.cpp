// gguf_linear with Q4_K: see linear.h and cpu/integers/gguf_formats.h.
#include "linear.h"

GRAPHLLM_GGUF_LINEAR(q4_k, Q4_K)
