"""JSON schemas and patterns: what they mean, and what each grammar may say."""
