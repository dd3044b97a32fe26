"""Exported weights: equal to the checkpoint's, loadable, whole or absent."""

import json

import pytest
import torch
from torch import nn
from training_cases import (
    assert_equal_weights,
    build_config,
    build_model,
    build_workload,
    read_state,
    read_weights,
    run_train,
)

from fulltilt.cli import run_command
from fulltilt.engine.checkpoints.checkpoint import save_checkpoint
from fulltilt.engine.checkpoints.export import export_weights
from fulltilt.errors import RunFolderError, UsageError

safetensors = pytest.importorskip("safetensors")


def load(path):
    from safetensors.torch import load_file

    with safetensors.safe_open(path, "pt") as file:
        return load_file(path), file.metadata()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    run_train(folder)
    return folder


def test_what_is_written_is_what_was_trained(folder, tmp_path, capsys):
    out = tmp_path / "deep" / "w.safetensors"
    assert run_command(["export", str(folder), str(out)]) == 0
    tensors, metadata = load(out)
    assert_equal_weights(tensors, read_weights(folder))
    build_model().load_state_dict(tensors, strict=True)
    assert (metadata["fulltilt.step"], metadata["fulltilt.epoch"]) == ("12", "2")
    assert json.loads(metadata["fulltilt.metrics"]) == read_state(folder)["evaluations"][-1]["metrics"]
    assert metadata["fulltilt.config_digest"] == build_config().digest
    assert "model weights of step 12" in capsys.readouterr().out
    assert [path.name for path in out.parent.iterdir()] == ["w.safetensors"], "no temporary file stays"
    assert run_command(["export", str(folder), str(out)]) == 0, "an earlier one gives way"


def test_a_file_that_is_no_export_is_not_written_over(folder, capsys):
    """``export run run/checkpoint.pt`` destroyed what it had read."""
    kept = (folder / "checkpoint.pt").read_bytes()
    assert run_command(["export", str(folder), str(folder / "checkpoint.pt")]) == 2
    assert "checkpoint.pt is there already and holds something else; name another" in capsys.readouterr().err
    assert (folder / "checkpoint.pt").read_bytes() == kept


def test_the_moving_average_goes_first_where_there_is_one(folder, tmp_path):
    run_train(tmp_path / "run", build_config(optim__ema=0.8))
    state = read_state(tmp_path / "run")
    assert export_weights(tmp_path / "run", tmp_path / "a.safetensors").weights == "ema"
    tensors, _ = load(tmp_path / "a.safetensors")
    assert_equal_weights(tensors, state["model"] | state["average"]["weights"])
    assert not torch.equal(tensors["0.weight"], state["model"]["0.weight"])
    assert export_weights(tmp_path / "run", tmp_path / "b.safetensors", weights="model").weights == "model"
    tensors, metadata = load(tmp_path / "b.safetensors")
    assert_equal_weights(tensors, state["model"])
    assert metadata["fulltilt.weights"] == "model"
    with pytest.raises(UsageError, match="holds no moving average"):
        export_weights(folder, tmp_path / "c.safetensors", weights="ema")


class Tied(nn.Module):
    """Two names for one weight, a view of a buffer, and state that is no tensor."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.decode.weight = self.encode.weight
        self.register_buffer("transposed", torch.arange(6.0).reshape(2, 3).T)

    def get_extra_state(self):
        return {"n": 3}

    def set_extra_state(self, state):
        self.n = state["n"]


def test_tied_weights_keep_all_their_names(folder, tmp_path):
    state, model = read_state(folder), Tied()
    save_checkpoint(tmp_path, {**state, "model": dict(model.state_dict())})
    export = export_weights(tmp_path, tmp_path / "w.safetensors")
    tensors, _ = load(tmp_path / "w.safetensors")
    assert tensors.keys() == {"encode.weight", "decode.weight", "transposed"}
    assert torch.equal(tensors["decode.weight"], model.encode.weight)
    assert torch.equal(tensors["transposed"], model.transposed)
    assert export.notes == ("not tensors, so not in the file: _extra_state",)

    average = {"n_updates": 1, "weights": {"encode.weight": torch.full((4, 4), 7.0)}}
    save_checkpoint(tmp_path, {**state, "model": dict(model.state_dict()), "average": average})
    export_weights(tmp_path, tmp_path / "e.safetensors")
    tensors, _ = load(tmp_path / "e.safetensors")
    assert torch.equal(tensors["decode.weight"], average["weights"]["encode.weight"]), "averaged under both names"
    assert torch.equal(tensors["transposed"], model.transposed)


def test_a_folder_without_a_checkpoint_is_refused_and_without_evaluations_nothing_is_said_of_metrics(tmp_path, capsys):
    out = tmp_path / "w.safetensors"
    with pytest.raises(RunFolderError, match="holds no checkpoint"):
        export_weights(tmp_path, out)
    assert run_command(["export", str(tmp_path / "nowhere"), str(out)]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert not out.exists()
    run_train(tmp_path, workload=build_workload(validation=None), epochs=1)
    metadata = export_weights(tmp_path, out).metadata
    assert metadata["fulltilt.metrics"] == "{}"
    assert "fulltilt.metrics_step" not in metadata
