"""A/B comparison of servers: fresh starts from command lines, baselines, verdicts."""
