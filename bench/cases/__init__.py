"""The cases, by what they measure: a room for each kind of machine."""
