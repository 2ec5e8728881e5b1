"""What the benchmarks share: options and models (cases.py, presets.py), lengths, clocks, work in FLOPs."""
