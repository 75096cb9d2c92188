"""The HTTP interfaces of the server, one folder or file each."""
