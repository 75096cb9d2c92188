"""The model families: one file each, found by `graphllm.ir.registry.load_models`."""
