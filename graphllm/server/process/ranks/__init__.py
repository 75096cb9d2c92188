"""One server for each data parallel rank, on ports of their own behind somebody else's load balancer."""
