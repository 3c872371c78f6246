"""The sidecar process: it asks the probe, judges, stores, exports, alerts and mitigates."""
