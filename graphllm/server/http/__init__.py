"""HTTP without any API: bodies, events, errors, the document of routes, limits of a connection."""
