"""Parts of the step from outside: each one file and one line of entry_points.txt."""
