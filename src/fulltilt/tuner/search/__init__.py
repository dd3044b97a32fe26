"""Choose the next plan to run, and lead a search from start to end."""
