"""A GPU: functions of cubins, and captured graphs."""
