"""An artifact becomes a running engine core, on one device or on several ranks."""
