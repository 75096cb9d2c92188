// gguf_linear with Q5_1: see linear.h and cpu/integers/gguf_formats.h.
#include "linear.h"

GRAPHLLM_GGUF_LINEAR(q5_1, Q5_1)
