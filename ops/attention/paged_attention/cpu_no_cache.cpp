// encoder_attention: the same tiles without a cache, keys and values of all of a sequence as they lie in the step's rows.
#include "batch.h"

GRAPHLLM_ENCODER_ATTENTION(graphllm_encoder_attention_f32, f32)
GRAPHLLM_ENCODER_ATTENTION(graphllm_encoder_attention_bf16, bf16)
