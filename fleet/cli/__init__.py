"""The `fleet` command. Subcommands import their implementations when they run. The package knows no
model, only the declarations in `fleet.graphs`.
"""

import sys


def entry() -> None:
    """Run the `fleet` console script. Imports are inside the function, so that Ctrl-C while they
    load ends it without a traceback.
    """
    try:
        from fleet.cli.environment import restart_without_secrets

        restart_without_secrets(sys.argv[1:])
        from fleet.process.beat import adopt_inherited

        adopt_inherited()
        from fleet.cli.main import main

        main()
    except KeyboardInterrupt:
        sys.exit(130)
