// sparse_latent_attention with a cache of the rows' dtype.
#include "chosen.h"

GRAPHLLM_SPARSE_LATENT_ATTENTION(graphllm_sparse_latent_attention_f32, f32, f32)
GRAPHLLM_SPARSE_LATENT_ATTENTION(graphllm_sparse_latent_attention_bf16, bf16, bf16)
