"""Exchange among the ranks of a group."""
