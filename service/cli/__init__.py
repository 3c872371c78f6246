"""The command line: `flipwatch serve | scan | baseline | status | mitigate | inject | doctor`.

Exit codes: 0 ok, 1 a finding, 2 cannot tell (also every mistake in the call), 130 interrupted.
"""

from .app import main

__all__ = ["main"]
