"""Requests for vectors: pooling, classification, scores, reranking."""
