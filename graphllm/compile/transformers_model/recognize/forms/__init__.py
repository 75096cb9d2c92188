"""One form for what may be written in many ways: casts, reshapes, slices, dimensions of 1, the place of tokens."""
