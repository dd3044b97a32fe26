"""How a configuration and a plan become a run that is ready to take steps."""
