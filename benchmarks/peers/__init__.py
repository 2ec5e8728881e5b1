"""Other systems at the same work, each in an environment of its own; `python -m benchmarks.peers` compares."""
