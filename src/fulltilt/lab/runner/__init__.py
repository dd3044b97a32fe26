"""Run one attempt on the node that an engine chose: train, renew the lease, ship what comes of it, end in time."""
