"""From a name to a folder, from a folder to an artifact, from an artifact to a running core."""
