"""onnx: the model exported once, quantised where asked, and executed by ONNX Runtime. Loads without torch."""

import copy
import json
import logging
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fulltilt.hardware import count_usable_cores, read_instruction_set
from fulltilt.infer.engines import Runner
from fulltilt.infer.joining import Sample
from fulltilt.infer.manifest import Manifest

if TYPE_CHECKING:
    from fulltilt.infer.model import InferenceModel

FILE = "model.onnx"
WITHOUT_SATURATION = ("AMX", "AVX512_VNNI", "AVX2_VNNI")
"""Instruction sets that add products of 8 bits in 32; others do so in 16, and overflow unless weights have 7 bits."""


def build(model: "InferenceModel", plan: Mapping[str, Any], folder: Path) -> None:
    """Export for every batch and length up to the declared ones, and quantise; 5 to 30 s. Imports torch."""
    import onnxruntime.quantization
    import torch

    from fulltilt.infer.engines._torch import apply_levers, plan_export

    setup = apply_levers(copy.deepcopy(model.module), plan, model.device)
    traced, dynamic = plan_export(model)
    logging.disable(logging.WARNING)  # remarks of libraries about models of any kind
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its own use of what torch deprecates
            names = [spec.name for spec in model.inputs]
            program = torch.onnx.export(
                setup.model, traced, dynamo=True, input_names=names, dynamic_shapes=dynamic, verbose=False
            )
            assert program is not None
            if plan["quantization"] == "none":
                program.save(str(folder / FILE))
                return
            del program.model_proto.graph.value_info[:]  # of fp32: the quantiser refuses types that it changes
            onnxruntime.quantization.quantize_dynamic(
                program.model_proto,
                folder / FILE,
                op_types_to_quantize=["MatMul", "Gemm", "LSTM"],
                per_channel=True,
                reduce_range=read_instruction_set() not in WITHOUT_SATURATION,
            )
    finally:
        logging.disable(logging.NOTSET)


class OnnxRunner(Runner):
    """A session of ONNX Runtime."""

    def __init__(self, file: Path, names: list[str], n_threads: int):
        self._file, self._names, self._n_threads = file, names, n_threads
        self._session = self._open()

    def _open(self, *, profile_prefix: str = "") -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = self._n_threads, 1
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.spin_duration_us", "20")  # then requests have the cores
        options.enable_profiling, options.profile_file_prefix = bool(profile_prefix), profile_prefix
        return onnxruntime.InferenceSession(str(self._file), options, providers=["CPUExecutionProvider"])

    def __call__(self, inputs: Sample) -> Sample:
        return tuple(self._session.run(None, dict(zip(self._names, inputs, strict=True))))

    def list_operators(self, inputs: Sample) -> tuple[str, ...]:
        """Run once in a session that profiles itself."""
        with tempfile.TemporaryDirectory(prefix="fulltilt-") as scratch:
            session = self._open(profile_prefix=f"{scratch}/profile")
            session.run(None, dict(zip(self._names, inputs, strict=True)))
            events = json.loads(Path(session.end_profiling()).read_text())
        return tuple(sorted({event["args"]["op_name"] for event in events if "op_name" in event.get("args", {})}))


def load(folder: Path, manifest: Manifest) -> OnnxRunner:
    n_threads = manifest.plan["threads"] or count_usable_cores()
    return OnnxRunner(folder / FILE, [spec.name for spec in manifest.inputs], n_threads)
