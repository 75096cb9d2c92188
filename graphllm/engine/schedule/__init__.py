"""Which requests run in the next step, with how many tokens each. No torch."""
