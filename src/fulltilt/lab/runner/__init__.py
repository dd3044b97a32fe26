"""Run one attempt on its node: train, renew the lease, ship what comes of it, end in time."""
