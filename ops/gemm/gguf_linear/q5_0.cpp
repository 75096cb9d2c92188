// gguf_linear with Q5_0: see linear.h and cpu/integers/gguf_formats.h.
#include "linear.h"

GRAPHLLM_GGUF_LINEAR(q5_0, Q5_0)
