// paged_attention with a cache of 8 bits a number.
#include "paged.h"

GRAPHLLM_PAGED_ATTENTION(graphllm_paged_attention_f32_e4m3, f32, e4m3)
GRAPHLLM_PAGED_ATTENTION(graphllm_paged_attention_f32_int8, f32, int8)
GRAPHLLM_PAGED_ATTENTION(graphllm_paged_attention_bf16_e4m3, bf16, e4m3)
GRAPHLLM_PAGED_ATTENTION(graphllm_paged_attention_bf16_int8, bf16, int8)
