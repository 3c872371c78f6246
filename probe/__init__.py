"""Everything that runs inside the vLLM server."""
