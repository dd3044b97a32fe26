"""How a run is measured: blocks of steps by the clock, probes of its parts, a rehearsal of the rest."""
