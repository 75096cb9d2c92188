"""Further libraries for structured outputs, one file each, and what they share."""
