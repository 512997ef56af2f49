"""`python -m fleet.cli`: the `fleet` command, for processes that start others in their own
environment.
"""

from fleet.cli import entry

entry()
