"""How a core is loaded: on the host without torch, on one device, or on several ranks. One file each."""
