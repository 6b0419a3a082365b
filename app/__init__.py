"""The `baton` command: one file per subcommand, over both sides and the protocol."""
