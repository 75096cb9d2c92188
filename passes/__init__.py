"""The passes: one file each, found by `graphllm.ir.registry.load_passes`."""
