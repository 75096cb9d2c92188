"""Cases that need a GPU, or several of one host."""
