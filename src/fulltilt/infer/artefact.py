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

from fulltilt.errors import FulltiltError, PlanObstacleError, describe_error
from fulltilt.hardware import read_instruction_set, read_package_version
from fulltilt.infer.engines import Runner, find_engine
from fulltilt.infer.gates.effect import EAGER, is_eager
from fulltilt.infer.joining import Sample, join_samples, read_length, split_outputs
from fulltilt.infer.manifest import Manifest
from fulltilt.infer.packing import SAMPLES, read_samples, write_samples
from fulltilt.levers import find_obstacles, load_inference_catalogue
from fulltilt.records import dumps, loads
from fulltilt.records.run_folder import write_atomic
from fulltilt.records.words import WORDS_FILE

if TYPE_CHECKING:
    from fulltilt.infer.model import InferenceModel

MANIFEST, EVIDENCE, WEIGHTS = "manifest.json", "evidence.json", "weights.pt"
NOT_OF_THE_ENGINE = (SAMPLES, EVIDENCE, WEIGHTS, WORDS_FILE)
N_STORED = 256
PACKAGES = ("torch", "onnxruntime")


class Artefact:
    """An artefact that was opened, ready to answer.

    Attributes:
        notes: What to know of it; the first one says why eager fp32 answers instead, where it does.
        plan: Of what answers: the manifest's, or eager fp32.
    """

    def __init__(self, folder: Path, manifest: Manifest, runner: Runner, refusal: str | None):
        self.folder, self.manifest, self.runner = folder, manifest, runner
        self.is_fallback = refusal is not None
        self.plan = build_eager_plan(manifest.plan) if self.is_fallback else manifest.plan
        self.notes = () if refusal is None else (f"eager fp32 answers instead: {refusal}",)

    @functools.cached_property
    def samples(self) -> tuple[Sample, ...]:
        return _read_samples(self.folder, "input")

    @functools.cached_property
    def recorded(self) -> tuple[Sample, ...]:
        """What the samples were answered with when the artefact was built."""
        return _read_samples(self.folder, "output")

    def run(self, inputs: Sample) -> Sample:
        """Answer arrays, batch first, with arrays, batch first."""
        return self.runner(inputs)

    def answer(self, samples: Sequence[Sample]) -> list[Sample]:
        """Join samples to a batch, answer it, and split the outputs; one by one, where samples cannot be joined."""
        if self.manifest.joins != "pad" and len(samples) > 1:
            return [self.answer([sample])[0] for sample in samples]
        lengths = [read_length(sample, self.manifest.inputs) for sample in samples]
        outputs = self.run(join_samples(samples, self.manifest.inputs, self.manifest.policy.length_multiple))
        return split_outputs(outputs, lengths, self.manifest.outputs_vary)


def build_artefact(model: "InferenceModel", plan: Mapping[str, Any], folder: Path, *, name: str = "model") -> Manifest:
    """Build an artefact of a plan; the manifest is written last, so what is there is whole.

    Raises:
        PlanObstacleError: a lever of the plan cannot apply to this model here.
        FulltiltError: the engine cannot build it; says why.
    """
    import torch

    obstacles = find_obstacles(plan, model.facts, load_inference_catalogue())
    if obstacles:
        raise PlanObstacleError("; ".join(obstacles))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    torch.save(model.module.state_dict(), folder / WEIGHTS)
    words = model.weights and Path(model.weights["checkpoint"]).with_name(WORDS_FILE)
    if words and words.is_file():
        shutil.copyfile(words, folder / WORDS_FILE)
    samples = model.samples[:N_STORED]
    write_samples(folder, samples)
    engine = find_engine(plan["engine"])
    try:
        engine.build(model, plan, folder)
    except Exception as error:  # compilers and exporters raise anything
        raise FulltiltError(
            f"engine {plan['engine']} cannot build the model ({describe_error(error).splitlines()[0][:300]}); "
            "use another engine"
        ) from error
    config = model.config
    manifest = Manifest(
        name=name,
        plan=dict(plan),
        device=str(model.device),
        inputs=model.inputs,
        max_length=model.max_length,
        joins=model.joins,
        outputs_vary=model.outputs_vary,
        takes_mapping=model.module.takes_mapping,
        built_with=read_surroundings(str(model.device)),
        cpu=read_instruction_set(),
        n_parameters=model.n_parameters,
        files={},
        config={"config": config.to_values(), "base_dir": config.base_dir, "provenance": config.provenance},
    )
    artefact = Artefact(folder, manifest, engine.load(folder, manifest, manifest.plan), None)
    outputs = [artefact.answer([sample])[0] for sample in samples]
    write_samples(folder, samples, outputs)
    return write_manifest(folder, manifest)


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
        FulltiltError: there is none, or it cannot be read.
    """
    try:
        return loads(Manifest, (folder / MANIFEST).read_text())
    except FileNotFoundError:
        raise FulltiltError(f"{folder} holds no {MANIFEST}; name the folder of an artefact that was built") from None
    except (ValueError, TypeError) as error:
        raise FulltiltError(f"{folder / MANIFEST} cannot be read ({error}); build the artefact anew") from None


def open_artefact(folder: Path, *, must_match: bool = True, n_threads: int | None = None) -> Artefact:
    """Open an artefact; where its engine cannot answer here, eager fp32 does, and ``notes`` say why.

    Args:
        n_threads: Of one operator; None: what the plan says.
        must_match: False, to verify: versions, instruction set and device may be others than those it was built with.

    Raises:
        FulltiltError: nor can eager fp32: the folder is damaged, or the code of its model is not there.
    """
    manifest = read_manifest(folder)
    if n_threads is not None:
        manifest = dataclasses.replace(manifest, plan={**manifest.plan, "threads": n_threads})
    refusal = find_damage(folder, manifest) or (find_mismatch(manifest) if must_match else None)
    if refusal is None:
        try:
            return Artefact(
                folder, manifest, find_engine(manifest.plan["engine"]).load(folder, manifest, manifest.plan), None
            )
        except Exception as error:  # loaders of libraries raise anything; the next line answers
            refusal = (
                f"engine {manifest.plan['engine']} does not open it ({describe_error(error).splitlines()[0][:300]})"
            )
    return Artefact(folder, manifest, _open_fallback(folder, manifest, refusal), refusal)


def open_eager(folder: Path, manifest: Manifest) -> Runner:
    """Open the model of an artefact in eager fp32, with the threads of its plan."""
    if manifest.device != "cpu":
        import torch

        if not torch.cuda.is_available():
            manifest = dataclasses.replace(manifest, device="cpu")
    return find_engine("eager").load(folder, manifest, build_eager_plan(manifest.plan))


def build_eager_plan(plan: Mapping[str, Any]) -> dict[str, Any]:
    return {**plan, **EAGER}


def _open_fallback(folder: Path, manifest: Manifest, refusal: str) -> Runner:
    if damage := find_damage(folder, manifest, (WEIGHTS,)):
        raise FulltiltError(f"{folder} cannot be opened: {refusal}; nor in eager fp32: {damage}")
    try:
        return open_eager(folder, manifest)
    except Exception as error:  # the user's code may raise anything
        why = describe_error(error).splitlines()[0]
        raise FulltiltError(f"{folder} cannot be opened: {refusal}; nor in eager fp32: {why}") from error


def find_damage(folder: Path, manifest: Manifest, names: Sequence[str] | None = None) -> str | None:
    """Say which file is missing or another than the one that was built; None: all are as they were.

    Args:
        names: These files; None: those of the engine, which are read to answer.
    """
    if names is None:
        names = [name for name in manifest.files if name not in NOT_OF_THE_ENGINE]
        names += [WEIGHTS] if manifest.plan["engine"] in ("eager", "compile") else []
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
    for name in (*find_packages(manifest.plan["engine"]), "gpu"):
        if here.get(name) != manifest.built_with.get(name):
            was, now = manifest.built_with.get(name), here.get(name) or "none"
            return f"built with {name} {was}, here is {now}; run fulltilt infer verify, or build it anew"
    if manifest.cpu != read_instruction_set():
        return f"built on a CPU with {manifest.cpu}, this one has {read_instruction_set()}; build it anew"
    return None


def find_packages(engine: str) -> tuple[str, ...]:
    """Return the packages whose versions the files of an engine belong to, without importing torch for ONNX."""
    return ("onnxruntime",) if engine == "onnx" else ("torch",)


def read_surroundings(device: str) -> dict[str, str]:
    """Read the versions, and the GPU, that an artefact belongs to."""
    found = {"python": platform.python_version()}
    found |= {name: version for name in PACKAGES if (version := read_package_version(name))}
    if device != "cpu":
        import torch

        if torch.cuda.is_available():
            found["gpu"] = torch.cuda.get_device_name(device)
    return found


def compute_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_samples(folder: Path, kind: str) -> tuple[Sample, ...]:
    try:
        return read_samples(folder, kind)
    except (OSError, ValueError, KeyError) as error:
        raise FulltiltError(f"{folder / SAMPLES} cannot be read ({error}); build the artefact anew") from error
