"""Build what a component call names: find the target, type its arguments, call it."""

import dataclasses
import functools
import importlib
import inspect
import sys
import typing
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter
from pydantic.errors import PydanticUserError

from fulltilt.config.calls import ComponentCall, format_value, parse_call
from fulltilt.config.hints import admits, describe_type
from fulltilt.errors import ConfigError, UsageError, find_place, format_nearest


def build_component(
    call_or_text: ComponentCall | str,
    registry: Mapping[str, Callable[..., Any]],
    *,
    kind: str,
    where: str,
    base_dir: str | None = None,
    **given: Any,
) -> Any:
    """Find a component by name, bind its arguments and call it.

    A name is a key of ``registry``, or ``module:object`` in the user's code. A registry key that ends with a colon
    (``"timm:"``) is a resolver: it is called with the rest of the name and returns the callable.

    Args:
        kind: What is built, for messages: "model".
        where: The key it stands at, for messages: "data.dataset".
        base_dir: Folder that ``module:object`` is looked up in before the current folder and ``sys.path``.
        **given: Values for parameters of these names, where the target has them and the user has not set them.

    Raises:
        ConfigError: unknown name, unknown, missing or ill-typed argument, module or attribute not found.
    """
    call = parse_call(call_or_text) if isinstance(call_or_text, str) else call_or_text
    target = find_target(call.name, registry, kind=kind, where=where, base_dir=base_dir)
    if _is_ready(target, call, where):
        return target
    arguments = bind_call(call, target, where=where, registry=registry, given=given)
    accepted = {name for name, parameter in (_read_parameters(target) or {}).items() if _is_named(parameter)}
    return target(**{name: value for name, value in given.items() if name in accepted} | arguments)


def check_component(
    call_or_text: ComponentCall | str,
    registry: Mapping[str, Callable[..., Any]],
    *,
    kind: str,
    where: str,
    base_dir: str | None = None,
    given: Collection[str] = (),
) -> dict[str, Any]:
    """Return the arguments that a call names; raise the ConfigError of ``build_component`` as far as it is known."""
    call = parse_call(call_or_text) if isinstance(call_or_text, str) else call_or_text
    target = find_target(call.name, registry, kind=kind, where=where, base_dir=base_dir)
    return {} if _is_ready(target, call, where) else bind_call(call, target, where=where, given=given)


def _is_ready(target: Any, call: ComponentCall, where: str) -> bool:
    """Return whether what was found is the component itself, even when it is callable: no class and no function."""
    if isinstance(target, type | functools.partial) or inspect.isroutine(target):
        return False
    if call.args or call.kwargs:
        said = f"{call.name} is of type {type(target).__name__} and takes no arguments; drop them"
        raise ConfigError(said, key=where)
    return True


def find_target(
    name: str, registry: Mapping[str, Callable[..., Any]], *, kind: str, where: str, base_dir: str | None = None
) -> Any:
    """Return the callable (or ready object) that a name stands for, or raise a ConfigError."""
    if name in registry:
        return registry[name]
    prefix, colon, rest = name.partition(":")
    if colon and f"{prefix}:" in registry:
        return registry[f"{prefix}:"](rest)
    if colon:
        return import_object(name, base_dir=base_dir, where=where)
    nearest = format_nearest(name, [f"{n}NAME" if n.endswith(":") else n for n in registry])
    raise ConfigError(f"unknown {kind} {name!r}; {nearest}, or module:object for your own", key=where)


def import_object(path: str, *, base_dir: str | None = None, where: str | None = None) -> Any:
    """Import ``module:object``; dots in ``object`` reach inside it.

    ``base_dir`` and the current folder are put in front of ``sys.path`` and stay there: data workers and unpickling
    import the module again by its name.

    Raises:
        ConfigError: no such module, no such attribute, or the module's own imports fail.
    """
    module_name, _, attributes = path.partition(":")
    folders = [str(Path(folder).resolve()) for folder in (base_dir, ".") if folder is not None]
    sys.path[:] = dict.fromkeys((*folders, *sys.path))
    try:
        found: Any = importlib.import_module(module_name)
    except SystemExit as error:  # it would end the program, by 0 as if all were well
        said = f"importing {module_name} called sys.exit({error.code!r}); put that under if __name__ == '__main__':"
        raise ConfigError(said, key=where) from error
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            if module_name.endswith(".py") and any(Path(folder, module_name).is_file() for folder in folders):
                meant = f"{module_name.removesuffix('.py')}:{attributes}"
                said = f"{module_name} is a file, and a module is named without .py; write {meant}"
                raise ConfigError(said, key=where) from None
            looked = ", ".join(dict.fromkeys(folders))
            remedy = f"put {error.name}.py there, or add its folder to PYTHONPATH"
            said = f"no module {error.name!r} in {looked} or the environment; {remedy}"
            raise ConfigError(said, key=where) from None
        raise ConfigError(f"importing {module_name} failed: {error}; install what it imports", key=where) from error
    except (ImportError, SyntaxError) as error:
        raise ConfigError(f"importing {module_name} failed: {error}", key=where) from error
    except UsageError as error:  # of a Workload that the module makes as it is imported
        place = find_place(RuntimeError().with_traceback(error.__traceback__))
        raise ConfigError(f"importing {module_name} failed: {place}: {error}", key=where) from error
    except TypeError as error:
        if "Workload.__init__()" not in str(error):
            raise
        fields = ", ".join(field.name for field in dataclasses.fields(importlib.import_module("fulltilt").Workload))
        said = f"{find_place(error)}: {str(error).removeprefix('Workload.__init__() ')}; a Workload takes {fields}"
        raise ConfigError(said, key=where) from error
    module = found
    for name in attributes.split("."):
        if name.startswith("__"):
            raise ConfigError(f"{path}: {name} is Python's own; name a class or a function of yours", key=where)
        if not hasattr(found, name):
            if found is module and (own := _find_hidden(module, module_name, folders)):
                taken = f"{module_name} is another module, {getattr(module, '__file__', None) or 'built into Python'}"
                raise ConfigError(f"{taken}, which hides {own}; give that file another name", key=where)
            holder = getattr(found, "__name__", type(found).__name__)
            raise ConfigError(f"{holder} has no {name!r}; {format_nearest(name, _list_own(found))}", key=where)
        found = getattr(found, name)
    return found


def _find_hidden(module: Any, name: str, folders: Collection[str]) -> Path | None:
    """Find the user's file that a module of the same name hides, such as that of the standard library."""
    for folder in folders:
        own, file = Path(folder, *name.split(".")).with_suffix(".py"), getattr(module, "__file__", None)
        if own.is_file() and not (file and Path(file).exists() and own.samefile(file)):
            return own
    return None


def _list_own(holder: Any) -> list[str]:
    """List the public names of a module or class; of a module without what it imports from outside its package."""
    names = [name for name in dir(holder) if not name.startswith("_")]
    if not inspect.ismodule(holder):
        return names

    def is_own(value: Any) -> bool:
        if inspect.isclass(value) or inspect.isroutine(value):
            return f"{getattr(value, '__module__', None)}.".startswith(f"{holder.__name__}.")
        return not inspect.ismodule(value) and type(value).__module__ != "typing"

    return [name for name in names if is_own(getattr(holder, name))] or names


def bind_call(
    call: ComponentCall,
    target: Callable[..., Any],
    *,
    where: str,
    registry: Mapping[str, Callable[..., Any]] | None = None,
    given: Collection[str] = (),
) -> dict[str, Any]:
    """Return keyword arguments for ``target``, each of the type its annotation says.

    Args:
        registry: Where a call inside an argument is looked up and built; without one it stays a ComponentCall.
        given: Names that the caller will add, so that they are not missing.

    Raises:
        ConfigError: unknown argument (with the valid ones), too many, given twice, missing, or of the wrong type.
    """
    parameters = _read_parameters(target)
    if parameters is None:
        if call.args:
            raise ConfigError(f"{call.name} needs its arguments by name: name=value", key=where)
        return dict(call.kwargs)
    arguments = _name_arguments(call, parameters, where)
    hints = _read_hints(target)
    bound = {}
    for name, value in arguments.items():
        hint = hints.get(name, _hint_from_default(parameters[name])) if name in parameters else Any
        value = _build_nested(value, registry, where)
        try:
            bound[name] = _coerce(value, hint)
        except ValueError:  # pydantic's ValidationError is one
            said = f"{call.name}: {name}={format_value(value)}: expected {describe_type(hint)}"
            raise ConfigError(said, key=where) from None
    required = [name for name, p in parameters.items() if _is_named(p) and p.default is p.empty]
    missing = [name for name in required if name not in bound and name not in given]
    if missing:
        raise ConfigError(f"{call.name} needs {', '.join(missing)}; write {call.name}({missing[0]}=…)", key=where)
    return bound


def _name_arguments(call: ComponentCall, parameters: Mapping[str, inspect.Parameter], where: str) -> dict[str, Any]:
    by_position = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    by_name = [n for n, p in parameters.items() if _is_named(p)]
    if len(call.args) > len(by_position):
        takes = f"{len(by_position)} arguments by position ({', '.join(by_position)})"
        raise ConfigError(f"{call.name} takes {takes}, {len(call.args)} are given", key=where)
    arguments = dict(zip(by_position, call.args, strict=False))
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name, value in call.kwargs.items():
        if name in arguments:
            raise ConfigError(f"{call.name}: {name} is given by position and by name; keep one", key=where)
        if name not in by_name and not takes_any:
            remedy = format_nearest(name, by_name) if by_name else "it takes no arguments"
            said = f"{call.name} has no argument {name!r} (value {format_value(value)})"
            raise ConfigError(f"{said}; {remedy}", key=where)
        arguments[name] = value
    return arguments


def _build_nested(value: Any, registry: Mapping[str, Callable[..., Any]] | None, where: str) -> Any:
    if isinstance(value, ComponentCall) and registry is not None:
        return build_component(value, registry, kind="component", where=where)
    if isinstance(value, list):
        return [_build_nested(v, registry, where) for v in value]
    return value


def _coerce(value: Any, hint: Any) -> Any:
    """Return ``value`` as its annotation has it, or raise a ValueError; an unreadable annotation takes any value."""
    if hint is Any or hint is inspect.Parameter.empty or _holds_built(value):
        return value
    try:
        adapter = TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True, coerce_numbers_to_str=True))
    except (PydanticUserError, TypeError, NameError):
        return value
    if isinstance(value, bool) and admits(hint, int, float, complex) and not admits(hint, bool, Any):
        raise ValueError("true and false are not numbers")
    return adapter.validate_python(value)


def _holds_built(value: Any) -> bool:
    """Return whether a value is, or holds, an object that a nested call has built: its class is its type."""
    if isinstance(value, list):
        return any(_holds_built(v) for v in value)
    return not (value is None or isinstance(value, bool | int | float | str))


def _hint_from_default(parameter: inspect.Parameter) -> Any:
    """Return the type that a default tells; 0 and 1 may stand for floats, and most defaults tell none."""
    if isinstance(parameter.default, bool):
        return bool
    return int | float if isinstance(parameter.default, int | float) else Any


def _is_named(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def _read_parameters(target: Callable[..., Any]) -> dict[str, inspect.Parameter] | None:
    try:
        return dict(inspect.signature(target).parameters)
    except (ValueError, TypeError):
        return None


def _read_hints(target: Callable[..., Any]) -> dict[str, Any]:
    function = target.func if isinstance(target, functools.partial) else target
    if isinstance(function, type):
        function = function.__init__
    try:
        return typing.get_type_hints(inspect.unwrap(function), include_extras=True)
    except (NameError, TypeError, AttributeError):
        return {}
