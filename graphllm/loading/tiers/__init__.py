"""The folder of the cache's tier on disk: for which model its files are valid, and the secret of their names."""
