// gguf_linear with Q4_0: see linear.h and cpu/integers/gguf_formats.h.
#include "linear.h"

GRAPHLLM_GGUF_LINEAR(q4_0, Q4_0)
