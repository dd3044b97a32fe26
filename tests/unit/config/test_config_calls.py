"""Component calls: what is read, what is refused and where."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulltilt.config import ComponentCall, parse_call, parse_pipeline
from fulltilt.errors import ConfigError


def test_typed_values():
    call = parse_call("f(1, 2.5, 1e-4, -3, true, false, null, word, 'two words', [1, a], (0.8, 1.0), g(x=2))")
    numbers, words = (1, 2.5, 1e-4, -3, True, False, None), ("word", "two words", [1, "a"], [0.8, 1.0])
    assert (call.name, call.args) == ("f", (*numbers, *words, ComponentCall("g", (), {"x": 2})))
    assert [type(v) for v in call.args[:5]] == [int, float, float, int, bool]


@pytest.mark.parametrize(
    ("text", "kwargs"),
    [
        ("basic(split=train, shuffle=false)", {"split": "train", "shuffle": False}),
        ("cifar10(root=data/cifar, path=/mnt/x-1.h5)", {"root": "data/cifar", "path": "/mnt/x-1.h5"}),
        ("f(a=\"x, y = (1)\", b='it\\'s')", {"a": "x, y = (1)", "b": "it's"}),
        ("f( a = 1 , b = 2, )", {"a": 1, "b": 2}),
        ("f(loss=my_module:Loss(w=2))", {"loss": ComponentCall("my_module:Loss", (), {"w": 2})}),
        ("f(크기=3)", {"크기": 3}),
        ("f(version=1.2.3, name=2x)", {"version": "1.2.3", "name": "2x"}),
    ],
)
def test_named_arguments(text, kwargs):
    assert dict(parse_call(text).kwargs) == kwargs


@pytest.mark.parametrize(
    "name", ["timm:convnext_tiny", "torchvision:resnet50", "my.module:build", "resnet50.a1_in1k", "모듈:일감"]
)
def test_names_with_prefix(name):
    assert parse_call(f"{name}(a=1)").name == name
    assert parse_call(name) == ComponentCall(name)


def test_pipeline_keeps_order():
    stages = parse_pipeline("random_crop(32, padding=4) | random_flip | normalize")
    assert [s.name for s in stages] == ["random_crop", "random_flip", "normalize"]
    assert stages[0].args == (32,)
    with pytest.raises(ConfigError, match="component name at column 5"):
        parse_pipeline("a | | b")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("f(a=)", "expected a value at column 5"),
        ("f(a=1", "expected ',' or ')' at column 6, found the end"),
        ("f(a=1, a=2)", "a is given twice"),
        ("f(a=1, 2)", "without a name cannot follow"),
        ("f(1) g", "nothing more (one call only) at column 6"),
        ("f(1) | g", "a pipeline belongs"),
        ("", "a component name at column 1, found the end"),
        ("mine:", "an object's name, mine:NAME, at column 6, found the end"),
        ("3(a)", "a component name"),
        ("f([1, 2)", "',' or ']'"),
        ("f('open)", "a value"),
        ("f(__import__('os').system('x'))", "',' or ')'"),
        ("f" * 3 + "(" * 200, "at most 50"),
        ("f(" * 200, "at most 50"),
        ("f(" + "[" * 5000, "at most 50"),
    ],
)
def test_refused_with_position(text, said):
    with pytest.raises(ConfigError, match="expected") as error:
        parse_call(text)
    assert said in str(error.value)


names = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
numbers = st.integers(-(10**12), 10**12) | st.floats(allow_nan=False, allow_infinity=False)


def calls(values):
    arguments = st.lists(values, max_size=3).map(tuple)
    return st.builds(ComponentCall, names, arguments, st.dictionaries(names, values, max_size=3))


values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(),
    lambda inner: st.lists(inner, max_size=3) | calls(inner).filter(lambda call: call.args or call.kwargs),
    max_leaves=6,
)


@given(calls(values))
def test_text_of_a_call_reads_back(call):
    assert parse_call(str(call)) == call


@given(st.text(alphabet="ab(=),[]|'\"1. \\:", max_size=30))
def test_any_text_is_read_or_refused(text):
    try:
        stages = parse_pipeline(text)
    except ConfigError:
        return
    assert parse_pipeline(" | ".join(map(str, stages))) == stages
