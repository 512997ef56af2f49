"""`python -m fleet.cli`: the same as the `fleet` command, for processes that start others of their own environment."""

from fleet.cli import entry

entry()
