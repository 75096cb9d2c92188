"""Trains the embedded models: tasks, data, training and evaluation. Not part of the package."""
