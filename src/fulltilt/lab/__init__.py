"""Queue experiments in a durable database and run each as a process on the devices of this machine."""
