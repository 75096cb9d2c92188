"""`graphllm quantize`: a 16-bit checkpoint becomes a quantized one of compressed-tensors, a layer at a time."""
