"""Write an artefact and open it; eager fp32 answers in place of one that does not belong here.

Opening imports torch only where the engine needs it.
"""

import dataclasses
import functools
import hashlib
import platform
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fulltilt.errors import FulltiltError, PlanObstacleError, UsageError, describe_error
from fulltilt.hardware import read_instruction_set, read_package_version
from fulltilt.infer import joining
from fulltilt.infer.engines import WEIGHTS, Runner, find_engine
from fulltilt.infer.gates.effect import EAGER, is_eager
from fulltilt.infer.joining import Sample, join_samples, read_length, read_samples, split_outputs, write_samples
from fulltilt.infer.manifest import Manifest
from fulltilt.levers import find_obstacles, load_inference_catalogue
from fulltilt.records import dumps, loads
from fulltilt.records.run_folder import open_atomic, write_atomic
from fulltilt.records.words import WORDS_FILE

if TYPE_CHECKING:
    from fulltilt.infer.model import InferenceModel

MANIFEST, EVIDENCE = "manifest.json", "evidence.json"
N_STORED = 256


class Artefact:
    """An artefact that was opened, ready to answer.

    Attributes:
        manifest: With the plan of what answers.
        run: Answers arrays, batch first, with arrays, batch first.
        notes: Why eager fp32 answers instead, where it does.
    """

    def __init__(self, folder: Path, manifest: Manifest, run: Runner, notes: tuple[str, ...] = ()):
        self.folder, self.manifest, self.run, self.plan, self.notes = folder, manifest, run, manifest.plan, notes

    @functools.cached_property
    def samples(self) -> tuple[Sample, ...]:
        return read_samples(self.folder)

    def answer(self, samples: Sequence[Sample]) -> list[Sample]:
        """Join samples to a batch, answer it, and split the outputs; one by one, where samples cannot be joined."""
        if self.manifest.joins != "pad" and len(samples) > 1:
            return [self.answer([sample])[0] for sample in samples]
        lengths = [read_length(sample, self.manifest.inputs) for sample in samples]
        outputs = self.run(join_samples(samples, self.manifest.inputs))
        return split_outputs(outputs, lengths, self.manifest.outputs_vary)

    def list_shapes(self, sizes: Sequence[int] = (1, 3, 8)) -> list[Sample]:
        """List batches over the declared shapes: a few sizes of the shortest, the middle and the longest samples."""
        manifest = self.manifest
        ordered = sorted(self.samples, key=lambda sample: read_length(sample, manifest.inputs))
        n = len(ordered)
        starts = (0, n // 2, n - 1) if manifest.max_length else (0,)
        windows = [(min(at, max(0, n - size)), size) for at in starts for size in sizes]
        groups = [(ordered * size)[at : at + size] for at, size in windows if size == 1 or manifest.joins == "pad"]
        return [join_samples(group, manifest.inputs) for group in groups]


def build_artefact(model: "InferenceModel", plan: Mapping[str, Any], folder: Path, *, name: str = "model") -> Artefact:
    """Build an artefact of a plan, and return it open; the manifest is written last, so what is there is whole.

    Raises:
        PlanObstacleError: a lever of the plan cannot apply to this model here.
        FulltiltError: the engine cannot build it; says why. StorageError: no space is left.
    """
    from fulltilt.engine.checkpoints.checkpoint import write_state
    from fulltilt.infer.generate.decoding import find_writer

    obstacles = find_obstacles(plan, model.facts, load_inference_catalogue())
    if plan["cuda_graphs"] and model.joins != "pad":
        obstacles.append("cuda_graphs=True: samples that are answered one by one all have shapes of their own")
    if obstacles:
        raise PlanObstacleError("; ".join(obstacles))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    config, samples, device = model.config, model.samples[:N_STORED], str(model.device)
    manifest = Manifest(
        name=name,
        plan=dict(plan),
        device=device,
        inputs=model.inputs,
        max_length=model.max_length,
        joins=model.joins,
        outputs_vary=model.outputs_vary,
        takes_mapping=model.module.takes_mapping,
        writes_text=find_writer(model.module) is not None,
        built_with=read_surroundings(device),
        n_parameters=model.n_parameters,
        files={},
        config={"config": config.to_values(), "base_dir": config.base_dir, "provenance": config.provenance},
    )
    with open_atomic(folder / WEIGHTS) as stream:
        write_state(model.module.state_dict(), stream)
    words = model.weights and Path(model.weights["checkpoint"]).with_name(WORDS_FILE)
    if words and words.is_file():
        shutil.copyfile(words, folder / WORDS_FILE)
    write_samples(folder, samples)
    engine = find_engine(plan["engine"])
    try:
        if hasattr(engine, "build"):
            engine.build(model, plan, folder)
        artefact = Artefact(folder, manifest, engine.load(folder, manifest))
    except Exception as error:  # compilers and exporters raise anything
        raise FulltiltError(
            f"engine {plan['engine']} cannot build the model ({tell(error)}); use another engine"
        ) from error
    write_samples(folder, samples, [artefact.answer([sample])[0] for sample in samples])
    artefact.manifest = write_manifest(folder, manifest)
    return artefact


def write_manifest(folder: Path, manifest: Manifest) -> Manifest:
    """Write the manifest with the digests of all files that lie beside it, and return it."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST and p.suffix != ".log")
    digests = {str(path.relative_to(folder)): compute_digest(path) for path in files}
    manifest = dataclasses.replace(manifest, files=digests)
    write_atomic(folder / MANIFEST, dumps(manifest, indent=1) + "\n")
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of an artefact.

    Raises:
        UsageError: there is none, or it cannot be read.
    """
    try:
        manifest = loads(Manifest, (folder / MANIFEST).read_bytes())
        policy, dtypes = manifest.policy, [np.dtype(spec.dtype) for spec in manifest.inputs]
        numbers = len(dtypes), policy.max_batch, policy.max_tokens or 1
        if "engine" not in manifest.plan or min(numbers) < 1:
            raise ValueError(f"it names no engine, no input, or a number below 1: {policy}")
        return manifest
    except OSError as error:
        raise UsageError(f"{folder} holds no {MANIFEST} ({error.strerror}); name the folder of an artefact") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise UsageError(f"{folder / MANIFEST} cannot be read ({error}); build the artefact anew") from None


def open_artefact(folder: Path, *, must_match: bool = True, n_threads: int | None = None) -> Artefact:
    """Open an artefact; where its engine cannot answer here, eager fp32 does, and ``notes`` say why.

    Args:
        n_threads: Of one operator; None: what the plan says.
        must_match: False, to verify: versions, instruction set and device may be others than those it was built with.

    Raises:
        FulltiltError: nor can eager fp32: the folder is damaged, or the code of its model is not there.
    """
    manifest = read_manifest(folder)
    if damage := find_damage(folder, manifest, sorted({joining.SAMPLES, WORDS_FILE} & manifest.files.keys())):
        raise FulltiltError(f"{folder} cannot be opened: {damage}; build the artefact anew")
    if n_threads is not None:
        manifest = dataclasses.replace(manifest, plan={**manifest.plan, "threads": n_threads})
    engine = manifest.plan["engine"]
    names = [name for name in manifest.files if name.startswith("model.")] or [WEIGHTS]
    refusal = find_damage(folder, manifest, names) or (find_mismatch(manifest) if must_match else None)
    try:
        if refusal is None:
            return Artefact(folder, manifest, find_engine(engine).load(folder, manifest))
    except Exception as error:  # loaders of libraries raise anything; eager answers
        refusal = f"engine {engine} does not open it ({tell(error)})"
    try:
        if damage := find_damage(folder, manifest, [WEIGHTS]):
            raise FulltiltError(damage)
        return open_eager(folder, manifest, (f"eager fp32 answers instead: {refusal}",))
    except Exception as error:  # the user's code may raise anything
        raise FulltiltError(f"{folder} is unusable: {refusal}; nor in eager fp32: {tell(error)}; build anew") from error


def open_eager(folder: Path, manifest: Manifest, notes: tuple[str, ...] = ()) -> Artefact:
    """Open the model of an artefact in eager fp32, with the threads of its plan."""
    eager = dataclasses.replace(manifest, plan={**manifest.plan, **EAGER})
    return Artefact(folder, eager, find_engine("eager").load(folder, eager), notes)


def find_damage(folder: Path, manifest: Manifest, names: Sequence[str]) -> str | None:
    """Say which of these files is missing or changed since it was built; None: none is."""
    for name in names:
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if compute_digest(path) != manifest.files.get(name):
            return f"{name} is not the file that was built"
    return None


def find_mismatch(manifest: Manifest) -> str | None:
    """Say what here is another than where the artefact was built; None: nothing that its engine depends on."""
    if is_eager(manifest.plan):
        return None  # it is built anew at every start
    here = read_surroundings(manifest.device)
    packages = ("onnxruntime",) if manifest.plan["engine"] == "onnx" else ("torch", "torchao")
    for name in (*packages[: 1 if manifest.plan["quantization"] == "none" else None], "cpu", "gpu"):
        was, now = manifest.built_with.get(name), here.get(name)
        if was != now:
            return f"built with {name} {was}, here is {now}; run fulltilt infer verify, or build it anew"
    return None


def read_surroundings(device: str) -> dict[str, str]:
    """Read the versions, the instruction set and the GPU that an artefact belongs to."""
    found = {"python": platform.python_version(), "cpu": read_instruction_set()}
    found |= {name: version for name in ("torch", "onnxruntime", "torchao") if (version := read_package_version(name))}
    if device != "cpu":
        import torch

        if torch.cuda.is_available():
            found["gpu"] = torch.cuda.get_device_name(device)
    return found


def compute_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tell(error: Exception) -> str:
    """Describe an error in one line: exporters and compilers write pages."""
    return describe_error(error).splitlines()[0][:300]
