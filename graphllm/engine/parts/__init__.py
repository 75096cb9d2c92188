"""Parts of the step, one file a capability; part.py has the contract, core.py the list."""
