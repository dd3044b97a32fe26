"""What is read out of measured plans: their speeds, what they change, which of them are finalists, why none ran."""
