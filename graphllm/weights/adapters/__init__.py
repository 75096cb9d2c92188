"""LoRA adapters: their files, and the linear layers that they change."""
