"""What a candidate has to pass: its answers against eager fp32, and the proof that what was asked for really ran."""
