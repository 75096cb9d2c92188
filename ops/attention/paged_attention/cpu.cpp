// paged_attention with a cache of the queries' dtype.
#include "paged.h"

GRAPHLLM_PAGED_ATTENTION(graphllm_paged_attention_f32, f32, f32)
GRAPHLLM_PAGED_ATTENTION(graphllm_paged_attention_bf16, bf16, bf16)
