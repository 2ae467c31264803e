"""Which entries a tier of bounded size keeps: one contract, one file per policy."""
