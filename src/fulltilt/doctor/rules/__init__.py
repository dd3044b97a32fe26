"""The rules, one file each: ``read(source)`` finds places in a script's text, ``judge(observation)`` in its run."""

from fulltilt.doctor.rules import file_write, host_sync, slow_transform

RULES = (host_sync, slow_transform, file_write)
