// sparse_latent_attention with a cache of 8 bits a number.
#include "chosen.h"

GRAPHLLM_SPARSE_LATENT_ATTENTION(graphllm_sparse_latent_attention_f32_e4m3, f32, Latent<graphllm::e4m3>)
GRAPHLLM_SPARSE_LATENT_ATTENTION(graphllm_sparse_latent_attention_f32_int8, f32, Latent<graphllm::int8>)
GRAPHLLM_SPARSE_LATENT_ATTENTION(graphllm_sparse_latent_attention_bf16_e4m3, bf16, Latent<graphllm::e4m3>)
GRAPHLLM_SPARSE_LATENT_ATTENTION(graphllm_sparse_latent_attention_bf16_int8, bf16, Latent<graphllm::int8>)
