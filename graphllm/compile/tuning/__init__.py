"""Tuning: which implementation of each op is the fastest, measured in processes that compile in parallel."""
