"""An artefact is what was built, or eager fp32 answers and says why; what no longer holds is found by verify."""

import dataclasses
import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from fulltilt.cli import _infer_verify
from fulltilt.config import config_from_values, inference_plan_of
from fulltilt.errors import FulltiltError, PlanObstacleError, StorageError, UsageError
from fulltilt.infer import artefact as artefacts
from fulltilt.infer.artefact import (
    build_artefact,
    find_mismatch,
    open_artefact,
    read_manifest,
    write_manifest,
)
from fulltilt.infer.building import judge_candidate
from fulltilt.infer.check import plan_check
from fulltilt.infer.gates.accuracy import compare_outputs
from fulltilt.infer.joining import read_samples, write_samples
from fulltilt.infer.manifest import Policy
from fulltilt.infer.measuring import open_model
from fulltilt.infer.model import build_inference_model
from fulltilt.infer.verifying import run as verify_here
from fulltilt.infer.verifying import verify_artefact
from fulltilt.stats import compare_pairs

TASK = "tests.unit.infer.small_encoder:workload"


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = config_from_values({"task": TASK, "run": {"device": "cpu"}, "speed": {"threads": 1}}, base_dir="")
    return build_inference_model(config, device="cpu")


@pytest.fixture(scope="module")
def built(model, tmp_path_factory):
    """A quantised artefact, and the folder of one that is whole, which tests copy."""
    folder = tmp_path_factory.mktemp("built") / "int8"
    build_artefact(model, plan_of(model, quantization="int8"), folder)
    return folder


@pytest.fixture
def folder(built, tmp_path):
    copy = tmp_path / "artefact"
    copy.mkdir()
    for file in built.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def plan_of(model, **changes):
    return inference_plan_of(model.config).replace(**changes)


def change_manifest(folder, **changes):
    write_manifest(folder, dataclasses.replace(read_manifest(folder), **changes))


def verify(folder):
    said = []
    verify_here({"given": {"folder": str(folder)}}, said.append)
    return said[-1]["measured"]


def test_what_was_built_answers_as_it_did_and_holds_real_samples(built, model):
    opened = open_artefact(built)
    assert opened.notes == ()
    assert len(opened.samples) == 40
    for outputs, recorded in zip(opened.answer(opened.samples[:5]), read_samples(built, "output")[:5], strict=True):
        np.testing.assert_allclose(outputs[0], recorded[0], atol=0.02)
    names = {event.key for event in _profile(lambda: opened.answer(opened.samples[:2]))}
    assert "quantized::linear_dynamic" in names
    assert set(opened.manifest.files) == {"samples.npz", "weights.pt"}
    eager = model.answer(opened.samples[:5])
    assert (
        max(np.abs(a[0] - b[0]).max() for a, b in zip(eager, read_samples(built, "output")[:5], strict=True)) > 1e-4
    ), "it is int8"


def _profile(call):
    with torch.profiler.profile() as seen:
        call()
    return seen.key_averages()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"built_with": {"torch": "1.0"}}, "built with torch 1.0, here is"),
        ({"built_with": {"cpu": "AVX9"}}, "built with cpu AVX9, here is"),
        ({"plan": {"engine": "onnx", "quantization": "int8"}}, "engine onnx does not open it"),
    ],
)
def test_what_does_not_belong_here_is_refused_and_eager_fp32_answers(folder, model, changes, why):
    manifest = read_manifest(folder)
    change_manifest(folder, **{name: {**getattr(manifest, name), **values} for name, values in changes.items()})
    opened = open_artefact(folder)
    assert opened.notes
    assert opened.notes[0].startswith("eager fp32 answers instead: ")
    assert why in opened.notes[0]
    for outputs, eager in zip(opened.answer(model.samples[:3]), model.answer(model.samples[:3]), strict=True):
        np.testing.assert_allclose(outputs[0], eager[0], atol=1e-6)


def test_weights_of_another_model_and_torn_files_are_errors_with_both_reasons(folder):
    (folder / "weights.pt").write_bytes((folder / "weights.pt").read_bytes()[:-100])
    with pytest.raises(FulltiltError, match=r"weights\.pt is not the file that was built; nor in eager fp32"):
        open_artefact(folder)
    (folder / "manifest.json").write_text('{"version": 1, "na')
    with pytest.raises(FulltiltError, match=r"manifest\.json cannot be read"):
        open_artefact(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(FulltiltError, match=r"holds no manifest\.json"):
        open_artefact(folder)


def test_the_files_of_another_model_are_refused_with_the_reason_and_eager_answers_where_it_can(folder, model):
    (folder / "model.onnx").write_bytes(b"of this model")
    change_manifest(folder, plan={**read_manifest(folder).plan, "engine": "onnx"})
    (folder / "model.onnx").write_bytes(b"of another model")
    opened = open_artefact(folder)
    assert opened.notes == ("eager fp32 answers instead: model.onnx is not the file that was built",)
    np.testing.assert_allclose(opened.answer(model.samples[:1])[0][0], model.answer(model.samples[:1])[0][0], atol=1e-6)
    torch.save(torch.nn.Linear(2, 2).state_dict(), folder / "weights.pt")
    with pytest.raises(
        FulltiltError, match=r"unusable: model\.onnx .*; nor in eager fp32: .*weights\.pt is not the file"
    ):
        open_artefact(folder)
    change_manifest(folder)  # by somebody who writes the digests of both
    with pytest.raises(FulltiltError, match=r"is unusable: .*nor in eager fp32: .*state_dict"):
        open_artefact(folder)


@pytest.mark.parametrize("name", ["samples.npz", "words.json"])
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 torn"])
def test_samples_and_words_that_are_damaged_are_refused_before_anybody_reads_them(folder, name, content):
    (folder / "words.json").write_text('{"words": ["<unk>"], "tokenizer": "words"}')
    change_manifest(folder)
    assert not open_artefact(folder).notes
    (folder / name).write_bytes(content)
    with pytest.raises(FulltiltError, match=f"cannot be opened: {name} is not the file that was built; build"):
        open_artefact(folder)
    change_manifest(folder)  # by somebody who writes the digest of the damaged file
    if name == "samples.npz":
        with pytest.raises(FulltiltError, match=r"samples\.npz cannot be read \(.*\); build the artefact anew"):
            open_artefact(folder).samples  # noqa: B018


def test_samples_without_inputs_are_none(tmp_path):
    np.savez(tmp_path / "samples.npz", other=np.zeros(3))
    with pytest.raises(FulltiltError, match="cannot be read"):
        read_samples(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"plan": {}},
        {"inputs": []},
        {"inputs": [{"name": "x", "dtype": "banana", "shape": [None]}]},
        {"policy": {"max_batch": -1}},
        {"policy": {"max_tokens": -1}},
        {"policy": 3},
    ],
)
def test_a_manifest_that_no_server_could_keep_to_is_refused(folder, changes):
    found = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(found | changes))
    with pytest.raises(UsageError, match=r"manifest\.json cannot be read \(.*\); build the artefact anew"):
        read_manifest(folder)


def test_what_is_no_folder_of_an_artefact_is_a_wrong_word(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "nothing", tmp_path):
        with pytest.raises(UsageError, match=r"holds no manifest\.json \(.*\); name the folder"):
            read_manifest(path)
    (tmp_path / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(UsageError, match="cannot be read"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("name", ["weights.pt", "samples.npz"])
def test_a_full_disk_is_told_where_an_artefact_is_built(model, tmp_path, name):
    (tmp_path / name).symlink_to("/dev/full")
    with pytest.raises(StorageError, match=r"no space left for .*; free some and try again"):
        build_artefact(model, plan_of(model), tmp_path)
    assert not (tmp_path / "manifest.json").exists()


class Attack:
    def __reduce__(self):
        return os.mkdir, ("attacked",)


@pytest.mark.parametrize("name", ["weights.pt", "samples.npz"])
def test_a_pickle_in_an_artefact_is_not_executed(folder, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    if name == "weights.pt":
        torch.save({"head.weight": Attack()}, folder / name)
    else:
        np.savez(folder / name, input_0=np.array([Attack()], dtype=object), input_0_shapes=np.ones((1, 1), np.int64))
    change_manifest(folder)  # with the digest of the attacker's file
    with pytest.raises(FulltiltError):
        open_artefact(folder).samples  # noqa: B018
    assert pickle.dumps(Attack())
    assert not (tmp_path / "attacked").exists()


def test_a_plan_that_cannot_apply_and_an_engine_that_cannot_build_say_why(model, tmp_path, monkeypatch):
    with pytest.raises(PlanObstacleError, match="cuda_graphs=True: CUDA graphs exist on NVIDIA GPUs only"):
        build_artefact(model, plan_of(model, cuda_graphs=True), tmp_path / "a")

    class Unable:
        @staticmethod
        def build(*_):
            raise RuntimeError("no operator aten::mine\nmuch more")

    monkeypatch.setattr(artefacts, "find_engine", lambda name: Unable)
    with pytest.raises(
        FulltiltError, match=r"engine aot cannot build the model \(.*no operator aten::mine\); use another"
    ):
        build_artefact(model, plan_of(model, engine="aot"), tmp_path / "a")
    assert not (tmp_path / "a" / "manifest.json").exists()


def test_a_candidate_is_judged_by_its_answers_and_its_gain(model, folder):
    manifest, failures = judge_candidate(model, folder)
    assert manifest.accuracy.n_samples == 40
    assert 20 < manifest.accuracy.sqnr_db < 60
    assert manifest.accuracy.metric == "accuracy"
    assert manifest.accuracy.changed_labels_pct is not None
    assert all("eager fp32 in turns" in failure for failure in failures), "layers this small gain nothing by int8"
    evidence = json.loads((folder / "evidence.json").read_text())
    assert "quantized::linear_dynamic" in evidence["effect"]["operators"]
    assert evidence["effect"]["gain"]["n_groups"] >= 4
    assert read_manifest(folder) == manifest
    assert "evidence.json" in manifest.files


def test_verify_passes_what_holds_and_admits_it_for_another_release(folder, monkeypatch):
    monkeypatch.setattr("fulltilt.infer.verifying.compare_speed", lambda *_, **__: compare_pairs([0.3, 0.31] * 3))
    change_manifest(folder, built_with=read_manifest(folder).built_with | {"torch": "1.0"})
    found = verify(folder)
    assert [check["passed"] for check in found["checks"]] == [True] * 4, found
    assert (found["admitted"], found["mismatch"].partition(", here")[0]) == (True, "built with torch 1.0")
    assert find_mismatch(read_manifest(folder)) is None
    assert not open_artefact(folder).notes
    found = verify(folder)
    assert (found["admitted"], found["mismatch"]) == (False, None)


def test_verify_admits_nothing_where_it_cannot_write_and_keeps_what_it_found(folder, monkeypatch, capsys):
    def refuse(*_):
        raise StorageError("a disk that can only be read")

    monkeypatch.setattr("fulltilt.infer.verifying.compare_speed", lambda *_, **__: compare_pairs([0.3, 0.31] * 3))
    change_manifest(folder, built_with=read_manifest(folder).built_with | {"torch": "1.0"})
    monkeypatch.setattr("fulltilt.infer.verifying.artefacts.write_manifest", refuse)
    found = verify(folder)
    assert (found["passed"], found["admitted"], len(found["checks"])) == (True, False, 4)
    _infer_verify._print_result(found, to_stderr=False)
    assert "not admitted, its folder cannot be written: eager fp32" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("failed", "mismatch", "said"),
    [
        ("files", None, "eager fp32 answers in its place"),
        ("speed", "built with torch 1.0, here is 2.0; run", "eager fp32 answers in its place"),
        ("answers", None, "a server opens it all the same"),
        ("speed", None, "a server opens it all the same"),
    ],
)
def test_verify_says_who_answers_in_place_of_what_does_not_hold(failed, mismatch, said, capsys):
    checks = [{"name": failed, "passed": False, "text": "planted"}]
    result = {"name": "m", "passed": False, "checks": checks, "admitted": False, "mismatch": mismatch}
    _infer_verify._print_result(result, to_stderr=False)
    assert said in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("gains", "passed"), [((0.3, -0.3), False), ((-0.3, 0.3), True)])
def test_verify_holds_an_artefact_to_batches_as_it_serves_them(folder, monkeypatch, gains, passed):
    measured, left = [], list(gains)

    def compare(base, other, shapes):
        measured.append([len(each[0]) for each in shapes])
        gain = left.pop(0)
        return compare_pairs([gain, gain + 0.01] * 3)

    monkeypatch.setattr("fulltilt.infer.verifying.compare_speed", compare)
    change_manifest(folder, policy=Policy(max_batch=5))
    speed = verify(folder)["checks"][-1]
    assert measured == [[1] * len(measured[0]), [5]]
    assert speed["passed"] is passed
    assert " one by one; " in speed["text"]
    assert speed["text"].endswith("in batches up to 5, as served")
    left.append(0.3)
    change_manifest(folder, joins="alone")
    assert verify(folder)["checks"][-1]["text"].endswith("one by one"), "a server joins none"


def test_a_check_measures_an_artefact_and_none_of_another_task(folder):
    def plan(task=TASK, model=None, data=None, **targets):
        load = {"requests_per_s": 9.0, **targets}
        config = {"task": task, "model": model, "data": data or {}, "run": {"device": "cpu"}, "targets": load}
        return plan_check(config_from_values(config, base_dir=""), artefact=str(folder))

    checked = plan(samples_per_hour=1.0)
    assert (checked.artefact, checked.must_train) == (folder, False)
    requests = open_model({"artefact": str(folder)}, checked.load)
    answers = [requests.run([sample])[0] for sample in read_samples(folder)[:3]]
    assert compare_outputs(read_samples(folder, "output")[:3], answers)[0] > 60
    assert requests.said["levers"]["quantization"] == "int8"
    assert requests.said["weights"]["checkpoint"] == str(folder)
    with pytest.raises(UsageError, match=f"has task {TASK}, the configuration classification"):
        plan("classification", samples_per_hour=1.0)
    with pytest.raises(UsageError, match=r"has model None, the configuration small_cnn\(width=4\)"):
        plan(model="small_cnn(width=4)", samples_per_hour=1.0)
    with pytest.raises(UsageError, match="has dataset None, the configuration digits"):
        plan(data={"dataset": "digits"}, samples_per_hour=1.0)
    with pytest.raises(UsageError, match="check first_token_s and tokens_per_s without --artefact"):
        plan(first_token_s={"p95": 1.0})
    change_manifest(folder, built_with={})
    with pytest.raises(
        UsageError, match="nothing was measured, since eager fp32 answers instead: built with torch None"
    ):
        open_model({"artefact": str(folder)}, checked.load)


def test_an_artefact_that_can_only_be_read_is_verified_too(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr("fulltilt.infer.verifying.run_measuring", lambda given, **told: told["log_path"])
    assert verify_artefact(folder, on_progress=print) == tmp_path / "verify.log"


def test_verify_finds_other_answers_other_files_and_what_got_slower(folder, monkeypatch):
    monkeypatch.setattr("fulltilt.infer.verifying.compare_speed", lambda *_, **__: compare_pairs([-0.22, -0.23] * 3))
    found = {check["name"]: check for check in verify(folder)["checks"]}
    assert not found["speed"]["passed"]
    assert "0.80 times as fast" in found["speed"]["text"]
    write_samples(folder, read_samples(folder), [(a + 0.1,) for (a,) in read_samples(folder, "output")])
    built_with = read_manifest(folder).built_with | {"torch": "1.0"}
    changed = verify(folder)
    assert [(c["name"], c["passed"]) for c in changed["checks"]] == [("files", False)]
    change_manifest(folder, built_with=built_with)
    found = {check["name"]: check for check in verify(folder)["checks"]}
    assert not found["answers"]["passed"]
    assert read_manifest(folder).built_with == built_with, "what does not hold is not admitted"


@pytest.mark.slow
def test_an_onnx_artefact_answers_without_torch(model, tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    build_artefact(model, plan_of(model, engine="onnx", quantization="int8"), tmp_path / "a")
    code = """
import sys
from pathlib import Path
from fulltilt.infer.artefact import open_artefact
opened = open_artefact(Path(sys.argv[1]))
assert not opened.notes, opened.notes
assert len(opened.answer(opened.samples[:4])) == 4
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "a"], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr
