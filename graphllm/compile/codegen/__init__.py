"""From graphs to machine code: Inductor, Triton, Gluon and C++."""
