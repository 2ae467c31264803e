"""Are models right: every family with every rotation, real ones, how fast their identity is known."""
