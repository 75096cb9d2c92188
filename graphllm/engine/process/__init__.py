"""The engine core in a process of its own, and the fronts' connections to it."""
