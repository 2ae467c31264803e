"""Looking after a store: checking and mending it, collecting what nothing needs, copies, packs."""
