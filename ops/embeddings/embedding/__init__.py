"""embedding: specification in op.py; Inductor compiles and fuses the reference well, so there is no kernel."""

from graphllm.ops.embeddings.embedding.op import embedding

__all__ = ["embedding"]
