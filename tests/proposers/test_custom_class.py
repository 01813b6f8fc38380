from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from specplug.config import resolve_engine_args, resolve_speculative_config
from specplug.errors import ConfigError, PluginLoadError, SpecplugError
from specplug.hooks import SessionHooks, hookimpl
from specplug.methods import PluginConfig, PluginContext
from specplug.proposers import RowProposer, custom_class
from specplug.proposers.custom_class import CustomClassOptions, check_class_path
from specplug.types import Batch, Draft, Session, TokenIds


class RepeatLast(RowProposer):
    def propose_row(self, token_ids: TokenIds, limit: int) -> list[int]:
        return [token_ids[-1]] * limit


class Configured(RowProposer):
    def __init__(self, config: PluginConfig, context: PluginContext) -> None:
        self.token = config.settings["prompt_lookup_max"] + context.session.vocab_size

    def propose_row(self, token_ids: TokenIds, limit: int) -> list[int]:
        return [self.token - 10]


class BareHooks:
    @hookimpl
    def specplug_propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
        return Draft.from_lists([[7]] * len(batch))


class OneArgument(RowProposer):
    def __init__(self, config: PluginConfig) -> None: ...

    def propose_row(self, token_ids: TokenIds, limit: int) -> list[int]:
        return []


class Unfinished(RowProposer):
    """Without propose_row it cannot be built."""


class Broken(RowProposer):
    def __init__(self) -> None:
        raise KeyError("weights")

    def propose_row(self, token_ids: TokenIds, limit: int) -> list[int]:
        return []


class VllmLike:
    instances: list[VllmLike] = []

    def __init__(self, vllm_config: Any) -> None:
        self.k = vllm_config.speculative_config.num_speculative_tokens
        self.target: Any = "not loaded"
        VllmLike.instances.append(self)

    def load_model(self, target_model: Any) -> None:
        self.target = target_model

    def propose(self, sampled: Any, num_tokens: Any, token_ids: Any, slot_mappings: Any = None) -> list[list[int]]:
        return [[int(token_ids[row, num_tokens[row] - 1])] * self.k if new else [] for row, new in enumerate(sampled)]


class AsksTooMuch:
    def __init__(self, vllm_config: Any) -> None:
        self.parallel = vllm_config.parallel_config

    def propose(self, *_: Any, **__: Any) -> list[list[int]]:
        return []


class LoadFails(VllmLike):
    def load_model(self, target_model: Any) -> None:
        raise OSError("no disk")


class NoProposer:
    pass


def a_function() -> None: ...


HOME = "specplug_toy_classes.deep"


@pytest.fixture(autouse=True)
def importable_classes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This module's classes under an importable name, as a user's package would have them."""
    module = types.ModuleType(HOME)
    for name, value in list(globals().items()):
        if getattr(value, "__module__", None) == __name__:
            setattr(module, name, value)
    monkeypatch.setitem(sys.modules, HOME.partition(".")[0], types.ModuleType(HOME.partition(".")[0]))
    monkeypatch.setitem(sys.modules, HOME, module)
    VllmLike.instances.clear()
    yield


def build(class_name: str, *, model: Any = None, **settings: Any) -> Any:
    session = Session(vocab_size=10, max_num_seqs=2, max_model_len=16, num_speculative_tokens=3)

    def refuse(*_: Any) -> Any:
        raise SpecplugError("not used")

    context = PluginContext(session, SimpleNamespace(model=model, tokenizer=None), refuse, refuse)
    options = CustomClassOptions(model=f"{HOME}.{class_name}")
    (spec,) = custom_class.specplug_register()
    return spec.factory(PluginConfig("custom_class", 3, options, settings), context)


def drafted(instance: object, batch: Batch, limits: list[int]) -> list[int]:
    hooks = SessionHooks([("custom_class", instance)], vocab_size=10, strict=True)
    draft = hooks.propose(batch, limits)
    assert draft is not None
    ids: list[int] = draft.draft_token_ids.tolist()
    return ids


# --- the path -----------------------------------------------------------------------------------------------


def test_B150_four_distinct_texts() -> None:
    faults: list[Exception] = []
    for path in (None, "proposer", "specplug_x.Nope", f"{HOME}.RepeatLst"):
        with pytest.raises((ConfigError, PluginLoadError)) as caught:
            check_class_path(path)
        faults.append(caught.value)
    no_path, undotted, no_package, no_class = faults
    assert "needs the class of the proposer" in str(no_path)
    assert "'proposer' is not the dotted path of a class" in str(undotted)
    assert "cannot import 'specplug_x'" in str(no_package)
    assert isinstance(no_package, ImportError)
    assert isinstance(no_package.__cause__, ModuleNotFoundError)
    assert "has no class 'RepeatLst'; it has RepeatLast" in str(no_class)
    assert isinstance(no_path, ValueError) and isinstance(undotted, ValueError) and isinstance(no_class, ValueError)
    assert len({str(fault) for fault in faults}) == 4


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("", "needs the class"),
        ("org/name", "is a model id or a folder, not a class"),
        ("./proposers/mine.py", "is a model id or a folder, not a class"),
        ("package.", "is not the dotted path"),
        (".Class", "is not the dotted path"),
        ("a..B", "is not the dotted path"),
        ("my-package.Class", "is not the dotted path"),
        (f"{HOME}.a_function", "is a function, not a class; name a class"),
        (f"{HOME}.NoProposer", "is no proposer; give the class specplug hooks"),
        (f"{HOME}.Zzzz", "has no class 'Zzzz'; it has "),
        ("specplug_toy_classes.Any", "has no class 'Any'; it has no classes"),
    ],
)
def test_other_wrong_paths(path: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_class_path(path)
    assert text in str(caught.value)


def test_an_import_that_raises_keeps_its_cause(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "raises_at_import.py").write_text("raise RuntimeError('no licence')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        PluginLoadError, match=r"cannot import 'raises_at_import' \(RuntimeError: no licence\)"
    ) as caught:
        check_class_path("raises_at_import.Proposer")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_the_options_import_the_class_and_leave_the_form_of_the_path_to_the_configuration() -> None:
    assert CustomClassOptions().model is None
    assert CustomClassOptions(model="proposer").model == "proposer"
    assert CustomClassOptions(model=f"{HOME}.RepeatLast").model == f"{HOME}.RepeatLast"
    with pytest.raises(ValidationError, match="has no class 'RepeatLst'; it has RepeatLast"):
        CustomClassOptions(model=f"{HOME}.RepeatLst")
    with pytest.raises(PluginLoadError, match="cannot import 'specplug_x'"):
        CustomClassOptions(model="specplug_x.Nope")


@pytest.mark.parametrize("path", [f"{HOME}.RepeatLst", "specplug_x.Nope", "proposer", None])
def test_B150_a_wrong_path_is_found_before_the_target_is_asked_for(path: str | None) -> None:
    engine, _ = resolve_engine_args("no/such/model", {})
    methods = {"custom_class": custom_class.specplug_register()[0]}
    settings = {"method": "custom_class", "num_speculative_tokens": 2} | ({"model": path} if path else {})
    with pytest.raises((ConfigError, PluginLoadError)) as caught:
        resolve_speculative_config(settings, methods, engine=engine)
    assert len(getattr(caught.value, "faults", [""])) == 1


@pytest.mark.parametrize("name", ["RepeatLast", "BareHooks", "VllmLike"])
def test_a_good_path_gives_the_class(name: str) -> None:
    assert check_class_path(f"{HOME}.{name}") is globals()[name]


# --- specplug-shaped ----------------------------------------------------------------------------------------


def test_a_class_without_arguments(make_batch: Any) -> None:
    assert drafted(build("RepeatLast"), make_batch([[1, 2], [3, 4]]), [2, 1]) == [2, 2, 4]


def test_a_class_that_takes_config_and_context(make_batch: Any) -> None:
    assert drafted(build("Configured", prompt_lookup_max=5), make_batch([[1, 2]]), [1]) == [5]


def test_a_class_with_bare_hooks(make_batch: Any) -> None:
    assert drafted(build("BareHooks"), make_batch([[1, 2]]), [1]) == [7]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("OneArgument", r"must take \(config, context\), a PluginConfig and a PluginContext, or no arguments"),
        ("Unfinished", "propose_row"),
        ("Broken", "raised KeyError: 'weights'"),
        ("AsksTooMuch", r"AsksTooMuch\(VllmConfigView\) raised AttributeError: vllm_config.parallel_config is not"),
        ("LoadFails", "load_model raised OSError: no disk"),
    ],
)
def test_a_class_that_cannot_be_built(name: str, text: str) -> None:
    with pytest.raises(PluginLoadError, match=text) as caught:
        build(name)
    assert f"{HOME}.{name}" in str(caught.value)


# --- vLLM-shaped --------------------------------------------------------------------------------------------


def test_a_vllm_shaped_class_loads_and_drafts(make_batch: Any) -> None:
    model = object()
    instance = build("VllmLike", model=model)
    assert [made.target for made in VllmLike.instances] == [model]
    assert drafted(instance, make_batch([[1, 2], [3, 4]]), [3, 1]) == [2, 2, 2, 4]
