// gguf_linear with Q8_0: see linear.h and cpu/integers/gguf_formats.h.
#include "linear.h"

GRAPHLLM_GGUF_LINEAR(q8_0, Q8_0)
