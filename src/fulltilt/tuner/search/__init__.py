"""How the next plan to run is chosen, and how a search goes from start to end."""
