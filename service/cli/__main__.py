"""`python -m flipwatch.service.cli` is the `flipwatch` program."""

from . import main

main()
