"""Routes of models that give vectors: embeddings, classes, scores, reranking."""
