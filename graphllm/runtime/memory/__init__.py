"""Device memory: arrays, caches, states between steps, staging of inputs."""
