"""How close fused answers come to the full prefill's: arms, metrics, runs, summaries and reports."""
