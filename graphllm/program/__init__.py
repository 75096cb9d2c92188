"""What a compiled program is, as data: written at compile time, read by the runtime, planned once."""
