"""What all interfaces of the server use: running requests, and the state that requests share."""
