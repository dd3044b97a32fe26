"""Judge a candidate: its answers against eager fp32, and whether what was asked for really ran."""
