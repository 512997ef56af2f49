"""The `fleet` command. Each subcommand imports what it runs only when it runs it; it knows no model, only a declaration."""

import sys


def entry() -> None:
    """The console script. Imports inside, so that Ctrl-C while they load ends as quietly as later."""
    try:
        from fleet.cli.environment import start_again_without_secrets

        start_again_without_secrets(sys.argv[1:])
        from fleet.cli.main import main

        main()
    except KeyboardInterrupt:
        sys.exit(130)
