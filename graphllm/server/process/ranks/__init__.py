"""One server for each data parallel rank, on ports of their own, for a load balancer of the user's."""
