"""This machine and this process: compilers, the driver, memory, imports, locks. Imports nothing heavy."""
