"""Placement of experts on ranks, and cores that step together because they share experts."""
