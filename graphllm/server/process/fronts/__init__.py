"""Several processes that speak HTTP for one engine.

The controller is the process that was started: it has the listening socket, the engine (`EngineSupervisor`) and what
all requests share. It hands each connection to the front that has the fewest, and tells all of them how the engine
does. A front is a whole HTTP server with a connection of its own to the engine core, so tokens never pass the
controller.
"""
