"""Counts and times of the engine, as Prometheus families."""
