"""The processes of a server: what listens, what is started and watched, how it ends."""
