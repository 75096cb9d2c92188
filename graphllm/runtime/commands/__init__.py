"""Commands to the device, one file a capability; command.py has the contract."""
