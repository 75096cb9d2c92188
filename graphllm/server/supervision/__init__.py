"""What runs a server: its engine, metrics, probes, and what every request passes."""
