"""Whether a producer computes what this decoder would: probes, a comparison, a verdict."""
