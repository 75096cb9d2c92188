"""Memory of a rank that is given back while an engine sleeps, and taken again under the same addresses."""
