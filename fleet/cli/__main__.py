"""`python -m fleet.cli`: the `fleet` command, for Fleet's own child processes, which must run in
the same Python environment.
"""

from fleet.cli import entry

entry()
