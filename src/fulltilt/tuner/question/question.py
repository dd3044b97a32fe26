"""Describe what a search measures: its workload, options and machine."""

import dataclasses
from typing import Any

from fulltilt._version import __version__
from fulltilt.records import Machine, format_bytes
from fulltilt.tuner.question.data_stamp import stamp_data
from fulltilt.tuner.question.options import TuneOptions
from fulltilt.tuner.question.source import TuneTarget

CODE, DATA = "code of the workload", "files of the data"  # they change while the command stays the same


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """Holds what the results of a search depend on."""

    aim: TuneTarget
    options: TuneOptions
    machine: Machine

    def list_fingerprint_parts(self) -> dict[str, Any]:
        """List what the measured rows depend on, in the user's words: a refusal names the parts that changed.

        Budget and strategy are no part: more of a search may be asked for later.
        """
        aim, options, machine = self.aim, self.options, self.machine
        limit_bytes = options.memory_limit_bytes
        flags = {
            "--batch-sizes": options.batch_sizes and " ".join(map(str, options.batch_sizes)),
            "--num-workers": options.num_workers and " ".join(map(str, options.num_workers)),
            "--steps": options.n_steps,
            "--device": options.device,
            "--memory-limit": limit_bytes and f"{format_bytes(limit_bytes)} = {limit_bytes:,} bytes",
            "--free-batch": options.free_batch,
            "--quick (shorter trials)": options.is_quick,
            "--deadline": options.deadline_asked_s and f"{options.deadline_asked_s:g} s",
        }
        if options.rank_devices:
            flags["devices"] = " ".join(options.rank_devices)
        values = aim.config.to_values()
        values["run"].pop("promise")  # a search must not lose its rows to what it promised itself
        return {
            **values,
            "version of fulltilt": __version__,
            CODE: aim.code,
            DATA: stamp_data(aim.config),
            **{flag: "not given" if value is None or value is False else value for flag, value in flags.items()},
            "machine": {
                "host": machine.hostname_hash,
                "processor": machine.cpu_model,
                "usable cores": machine.n_cores_usable,
                "accelerators": [device.name for device in machine.devices],
                **machine.packages,
            },
        }
