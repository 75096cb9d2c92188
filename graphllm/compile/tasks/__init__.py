"""Units around a model for each task: sampling, drafting, trees, counts of experts."""
