"""Benchmarks: one file a claim; each ends with one JSON line, its ratios measured side by side in one run."""
