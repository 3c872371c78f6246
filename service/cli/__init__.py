"""The command line: `flipwatch serve | scan | baseline | compare | differential | integrity | status | mitigate | ...`.

Exit codes: 0 ok, 1 a finding, 2 cannot tell (also every mistake in the call), 130 interrupted.
"""

from .app import main

__all__ = ["main"]
