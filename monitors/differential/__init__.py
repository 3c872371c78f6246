"""The differential monitor: the live model against a clean one."""
