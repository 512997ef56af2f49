"""The `fleet` command. Each subcommand imports what it runs only when it runs it; it knows no model, only a declaration."""
