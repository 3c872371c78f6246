"""The canary: fixed prompts through the server's real path, and the heartbeat of its counters."""
