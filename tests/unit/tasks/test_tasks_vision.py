import subprocess
import sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec

import pytest
import torch

from fulltilt.errors import ConfigError
from fulltilt.tasks import build_model

needs_torchvision = pytest.mark.skipif(
    find_spec("torchvision") is None, reason="torchvision is not installed (extra: vision)"
)
needs_timm = pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed (extra: vision)")


def run_python(code, path=None):
    """``path`` comes before the installed packages."""
    code = f"import sys; sys.path.insert(0, {str(path)!r})\n{code}" if path else code
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture
def fake_torchvision(tmp_path):
    folder = tmp_path / "torchvision"
    folder.mkdir()
    return folder


@needs_torchvision
def test_a_torchvision_model_gets_the_number_of_classes_of_the_data():
    model = build_model("torchvision:resnet18", n_classes=7, in_channels=3, image_size=32)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 7)
    assert sum(p.numel() for p in model.parameters()) == 11_689_512 - 993 * 513


@pytest.mark.parametrize(
    ("call", "facts", "words"),
    [
        pytest.param(*row, marks=needs_timm if row[0].startswith("timm") else needs_torchvision)
        for row in [
            ("torchvision:resnet19", {}, ["no model 'resnet19'", "did you mean resnet18"]),
            ("torchvision:zzzz", {}, ["no model 'zzzz'", "for instance"]),
            ("torchvision:resnet18(zero_init=true)", {}, ["cannot be built", "'zero_init'"]),
            ("torchvision:resnet18(weights=DEFAULT)", {}, ["weights=DEFAULT", "never does", "my_module:build"]),
            ("torchvision:resnet18(pretrained=true)", {}, ["pretrained=True"]),
            ("torchvision:resnet18(7)", {}, ["torchvision:resnet18", "position"]),
            ("torchvision:resnet18", {"in_channels": 1}, ["3 channels", "has 1", "timm"]),
            ("torchvision:resnet18(replace_stride_with_dilation=[true])", {}, ["cannot be built", "dilation"]),
            ("timm:resnet10x", {}, ["no model 'resnet10x'", "did you mean"]),
            ("timm:resnet10t(pretrained=true)", {}, ["pretrained=True", "never does"]),
            ("timm:resnet10t(widht=3)", {}, ["timm:resnet10t cannot be built", "widht"]),
        ]
    ],
)
def test_a_call_that_cannot_be_built_is_explained(call, facts, words):
    with pytest.raises(ConfigError) as raised:
        build_model(call, **facts)
    assert [word for word in words if word not in str(raised.value)] == []


@needs_torchvision
@pytest.mark.parametrize("arguments", ["num_classes=5, zero_init_residual=true", "n_classes=5, weights=null"])
def test_arguments_of_the_call_win_and_reach_the_library(arguments):
    model = build_model(f"torchvision:resnet18({arguments})", n_classes=7)
    assert model.fc.out_features == 5
    assert model.layer1[0].bn2.weight.any() == ("weights" in arguments)


@needs_timm
def test_a_timm_model_gets_classes_and_channels_of_the_data():
    model = build_model("timm:resnet10t(drop_rate=0.25)", n_classes=7, in_channels=1, image_size=32)
    assert model(torch.zeros(2, 1, 32, 32)).shape == (2, 7)
    assert model.drop_rate == 0.25


@needs_torchvision
def test_torchvision_is_left_alone_until_a_model_asks_for_it_and_then_imported_once():
    done = run_python(
        "import sys\n"
        "from fulltilt.tasks.vision import import_torchvision as i\n"
        "print('torchvision' in sys.modules, 'timm' in sys.modules)\n"
        "assert i() is i()\n"
        "import torchvision.ops, torchvision.transforms.v2\n"
        "print(i().models.resnet18.__name__)"
    )
    assert done.stdout.splitlines() == ["False False", "resnet18"], done.stderr


class Absent(MetaPathFinder):
    """Knows neither library, and so stands for an environment without them."""

    def find_spec(self, name, path=None, target=None):
        if name in ("torchvision", "timm"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.fixture
def not_imported(monkeypatch):
    """As before the first import of the two; afterwards they are as they were."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("torchvision", "timm")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.usefixtures("not_imported")
@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_a_library_that_is_not_installed_names_the_extra(monkeypatch, library):
    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    with pytest.raises(ConfigError, match=r'not installed; pip install "fulltilt\[vision\]"'):
        build_model(f"{library}:resnet18")


@pytest.mark.usefixtures("not_imported")
def test_a_torchvision_that_fails_otherwise_says_so(fake_torchvision, monkeypatch):
    (fake_torchvision / "__init__.py").write_text("raise RuntimeError('compiled for another planet')\n")
    monkeypatch.syspath_prepend(fake_torchvision.parent)
    with pytest.raises(ConfigError, match=r"compiled for another planet.*install the version made for torch"):
        build_model("torchvision:resnet18")


def test_schemas_are_declared_for_operators_that_are_missing_and_for_no_other(fake_torchvision):
    """A package that asks for qnms, fails, and is imported again once it has been declared."""
    (fake_torchvision / "__init__.py").write_text(
        "import torch\n"
        "from torchvision import first\n"
        "if not torch._C._dispatch_has_kernel('torchvision::qnms') and not any(\n"
        "    s.name == 'torchvision::qnms' for s in torch._C._jit_get_schemas_for_operator('torchvision::qnms')\n"
        "):\n"
        "    raise RuntimeError('operator torchvision::qnms does not exist')\n"
    )
    (fake_torchvision / "first.py").write_text("print('imported')\n")
    done = run_python(
        "import torch\n"
        "from fulltilt.tasks.vision import import_torchvision\n"
        "import_torchvision()\n"
        "print(len(torch._C._jit_get_schemas_for_operator('torchvision::nms')))\n"
        "print(len(torch._C._jit_get_schemas_for_operator('torchvision::qnms')))",
        fake_torchvision.parent,
    )
    assert done.stdout.split() == ["imported", "imported", "0", "1"], done.stderr
