"""The ops: one folder each, found by `graphllm.ir.registry.load_ops`."""
