// latent_attention with a cache of the rows' dtype.
#include "latents.h"

GRAPHLLM_LATENT_ATTENTION(graphllm_latent_attention_f32, f32, f32)
GRAPHLLM_LATENT_ATTENTION(graphllm_latent_attention_bf16, bf16, bf16)
