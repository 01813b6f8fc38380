"""The built-in method ``custom_class``: a proposer named by the dotted path of its class."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Sequence
from types import ModuleType
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field, model_validator

from specplug.errors import ConfigError, PluginLoadError
from specplug.hooks.markers import PROJECT, hookimpl
from specplug.methods import Capabilities, MethodSpec, PluginConfig, PluginContext
from specplug.proposers.vllm_shaped import VllmShapedProposer
from specplug.proposers.vllm_view import VllmConfigView

__all__ = ["CustomClassOptions", "build_custom_class", "check_class_path", "is_specplug_shaped"]

SPECPLUG_API = (1, 0)

_EXAMPLE = 'model="package.module.ClassName"'


class CustomClassOptions(BaseModel):
    """The keys of ``custom_class``. A dotted ``model`` is imported here, so that its faults show before weights load.

    Whether there is a path and whether it is dotted is for the configuration to say; ``check_class_path`` says it too.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = Field(
        default=None, description="Dotted path of the proposer's class: package.module.ClassName."
    )

    @model_validator(mode="after")
    def _names_a_proposer(self) -> CustomClassOptions:
        if self.model is not None and _is_dotted(self.model):
            check_class_path(self.model)
        return self


def check_class_path(path: str | None) -> type:
    """Import the class that ``path`` names and see that it is a proposer.

    Needs no model, so it can run before weights load. Raises ``ConfigError`` when there is no path, when it is
    not a dotted name, when the module has no such class and when the class is no proposer; ``PluginLoadError``,
    with the cause, when the module cannot be imported.
    """
    if not path:
        raise ConfigError(f"custom_class needs the class of the proposer: write {_EXAMPLE}")
    if not _is_dotted(path):
        what = "is a model id or a folder, not a class" if "/" in path else "is not the dotted path of a class"
        raise ConfigError(f"model={path!r} {what}; write {_EXAMPLE}")
    module_name, _, class_name = path.rpartition(".")
    module = _import(module_name, path)
    found = getattr(module, class_name, None)
    if not inspect.isclass(found):
        raise ConfigError(_no_such_class(module, class_name, found))
    if not is_specplug_shaped(found) and not callable(getattr(found, "propose", None)):
        raise ConfigError(
            f"model={path!r} is no proposer; give the class specplug hooks (for example as a subclass of "
            "specplug.proposers.RowProposer) or vLLM's propose(sampled_token_ids, num_tokens_no_spec, "
            "token_ids_cpu, slot_mappings=None)"
        )
    return found


def _is_dotted(path: str) -> bool:
    parts = path.split(".")
    return len(parts) > 1 and all(part.isidentifier() for part in parts)


def is_specplug_shaped(found: type) -> bool:
    """True for a class with hook implementations of ours, marked or inherited."""
    marked = (getattr(found, name, None) for name in dir(found) if name.startswith(f"{PROJECT}_"))
    return any(hasattr(function, f"{PROJECT}_impl") for function in marked)


def _import(module_name: str, path: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except Exception as error:
        raise PluginLoadError(
            f"model={path!r}: cannot import {module_name!r} ({type(error).__name__}: {error}); "
            "install the package, or put its folder on PYTHONPATH"
        ) from error


def _no_such_class(module: ModuleType, class_name: str, found: object) -> str:
    where = f"model='{module.__name__}.{class_name}'"
    if found is not None:
        return f"{where} is a {type(found).__name__}, not a class; name a class"
    classes = sorted(
        name for name, value in vars(module).items() if inspect.isclass(value) and not name.startswith("_")
    )
    close = difflib.get_close_matches(class_name, classes, n=3) or classes[:8]
    return f"{where}: {module.__name__!r} has no class {class_name!r}; " + (
        f"it has {', '.join(close)}" if close else "it has no classes"
    )


def build_custom_class(config: PluginConfig, context: PluginContext) -> object:
    """The factory of ``custom_class``.

    A specplug-shaped class is built as ``Class(config, context)`` when its constructor takes two arguments, else
    as ``Class()``, and serves as it is. A vLLM-shaped one is built as ``Class(vllm_config)`` with a
    :class:`VllmConfigView`, gets ``load_model(target_model)`` if it has that, and serves behind an adapter.
    Raises ``PluginLoadError`` when building it fails.
    """
    path = cast(CustomClassOptions, config.options).model
    found: Any = check_class_path(path)
    if is_specplug_shaped(found):
        return _construct(found, path, *_specplug_arguments(found, path, config, context))
    proposer = _construct(found, path, VllmConfigView(config, context))
    if hasattr(proposer, "load_model"):
        _load_model(proposer, path, getattr(context.target, "model", None))
    return VllmShapedProposer(
        proposer,
        name=str(path),
        num_speculative_tokens=config.num_speculative_tokens,
        max_num_seqs=context.session.max_num_seqs,
        max_model_len=context.session.max_model_len,
    )


def _specplug_arguments(found: type, path: str | None, config: PluginConfig, context: PluginContext) -> tuple[Any, ...]:
    signature = inspect.signature(found)
    for arguments in ((config, context), ()):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return arguments
    raise PluginLoadError(
        f"custom_class {path}{signature} cannot be built; its constructor must take (config, context), "
        "a PluginConfig and a PluginContext, or no arguments"
    )


def _construct(found: Any, path: str | None, *arguments: Any) -> Any:
    try:
        return found(*arguments)
    except Exception as error:
        given = ", ".join(type(argument).__name__ for argument in arguments)
        raise PluginLoadError(f"custom_class {path}({given}) raised {type(error).__name__}: {error}") from error


def _load_model(proposer: Any, path: str | None, model: Any) -> None:
    try:
        proposer.load_model(model)
    except Exception as error:
        raise PluginLoadError(f"custom_class {path}.load_model raised {type(error).__name__}: {error}") from error


@hookimpl
def specplug_register() -> Sequence[MethodSpec]:
    return [
        MethodSpec(
            name="custom_class",
            kind="proposer",
            factory=build_custom_class,
            options=CustomClassOptions,
            capabilities=Capabilities(laws=frozenset({"one_hot", "unknown"}), deterministic=False),
            summary="Runs a proposer of yours, written for specplug or for vLLM, named by its class path.",
        )
    ]
