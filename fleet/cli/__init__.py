"""The `fleet` command. Subcommands import their implementations when they run. Knows no model, only
its declaration.
"""

import sys


def entry() -> None:
    """Run the console script. The imports are inside, so that Ctrl-C ends it quietly while they
    load.
    """
    try:
        from fleet.cli.environment import restart_without_secrets

        restart_without_secrets(sys.argv[1:])
        from fleet.cli.main import main

        main()
    except KeyboardInterrupt:
        sys.exit(130)
