"""Where entries are kept: leases and ledger, entry format, LMDB environment, tiers, tier stack."""
