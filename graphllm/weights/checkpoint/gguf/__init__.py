"""GGUF files: their headers, and what they call the settings and tensors of a Hugging Face checkpoint."""
