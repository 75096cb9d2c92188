"""Cases that measure what the host does around a model, and cases for any machine."""
