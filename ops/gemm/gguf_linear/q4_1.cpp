// gguf_linear with Q4_1: see linear.h and cpu/integers/gguf_formats.h.
#include "linear.h"

GRAPHLLM_GGUF_LINEAR(q4_1, Q4_1)
