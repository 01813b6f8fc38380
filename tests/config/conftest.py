from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import pytest
from pydantic import BaseModel, ConfigDict, Field, model_validator

from specplug.config import EngineArgs, ResolvedConfig, resolve_engine_args, resolve_speculative_config
from specplug.errors import ConfigError, PluginLoadError
from specplug.methods import Capabilities, MethodSpec


class NgramOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    prompt_lookup_max: int = 5
    prompt_lookup_min: int = 5
    ngram_backoff: bool = Field(default=True, description="Stand down after misses.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError("the window is reversed")
        return self


class MineOptions(BaseModel):
    mine_level: int = Field(default=1, ge=1, le=3)
    mine_names: tuple[str, ...] = ()


class NeedyOptions(BaseModel):
    needy_path: str
    needy_any: Any = None


class PairOptions(BaseModel):
    low: int = 1
    high: int = 2

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise ValueError("low exceeds high")
        return self


def spec(name: str, kind: str = "proposer", options: type[BaseModel] | None = None, **capabilities: Any) -> MethodSpec:
    return MethodSpec(
        name=name,
        kind=kind,  # type: ignore[arg-type]
        factory=lambda config, context: object(),
        capabilities=Capabilities(**capabilities),
        **({} if options is None else {"options": options}),
    )


MODEL = {"needs_draft_model": True, "laws": frozenset({"one_hot", "dense"})}
SPECS = [
    spec("ngram", options=NgramOptions),
    spec("custom_class"),
    spec("suffix"),
    spec("draft_model", **MODEL),
    *(
        spec(name, **MODEL)
        for name in ("pard", "eagle", "eagle3", "mtp", "mlp_speculator", "medusa", "dflash", "dspark")
    ),
    spec("extract_hidden_states", "observer"),
    spec("tli", "draft_space"),
    spec("adaptive", "wrapper"),
    spec("dynamic", "policy"),
    spec("acceptance", "observer"),
    spec("mine", "policy", options=MineOptions),
    spec("needy", "policy", options=NeedyOptions),
    spec("pair", "policy", options=PairOptions),
    spec("typical", "verifier", lossless=False),
    spec("exact", "verifier"),
    spec("other", "proposer", **MODEL),
]


class LazyMethods(Mapping[str, MethodSpec]):
    """Like the hooks layer's mapping: iterating gives names, only a look-up imports (here: is recorded)."""

    def __init__(self, specs: list[MethodSpec], broken: Mapping[str, Exception] | None = None) -> None:
        self._specs = {each.name: each for each in specs}
        self._broken = dict(broken or {})
        self.imported: list[str] = []

    def __getitem__(self, name: str) -> MethodSpec:
        self.imported.append(name)
        if name in self._broken:
            raise self._broken[name]
        return self._specs[name]

    def __iter__(self) -> Iterator[str]:
        yield from {**self._specs, **self._broken}

    def __len__(self) -> int:
        return len(list(iter(self)))


@pytest.fixture
def methods() -> LazyMethods:
    return LazyMethods(SPECS)


@pytest.fixture
def without() -> Callable[..., LazyMethods]:
    """The installed plugins, some missing, some broken."""

    def build(*missing: str, broken: Mapping[str, Exception] | None = None) -> LazyMethods:
        gone = {*missing, *(broken or {})}
        return LazyMethods([each for each in SPECS if each.name not in gone], broken)

    return build


@pytest.fixture
def load_error() -> PluginLoadError:
    error = PluginLoadError("plugin 'suffix' (specplug-suffix 1.2) failed to import: No module named 'numba'")
    error.__cause__ = ImportError("No module named 'numba'")
    return error


Resolve = Callable[..., ResolvedConfig]


@pytest.fixture
def engine() -> EngineArgs:
    return resolve_engine_args("target", {})[0]


@pytest.fixture
def resolve(methods: LazyMethods, engine: EngineArgs) -> Resolve:
    def call(value: Any = None, installed: Any = None, **kwargs: Any) -> ResolvedConfig:
        kwargs.setdefault("engine", engine)
        return resolve_speculative_config(value, methods if installed is None else installed, **kwargs)

    return call


@pytest.fixture
def faults(resolve: Resolve) -> Callable[..., tuple[str, ...]]:
    """The faults of a configuration that cannot be."""

    def call(value: Any = None, installed: Any = None, **kwargs: Any) -> tuple[str, ...]:
        with pytest.raises(ConfigError) as caught:
            resolve(value, installed, **kwargs)
        return caught.value.faults

    return call


@pytest.fixture
def fault(faults: Callable[..., tuple[str, ...]]) -> Callable[..., str]:
    """The one fault of a configuration that has exactly one."""

    def call(value: Any = None, installed: Any = None, **kwargs: Any) -> str:
        found = faults(value, installed, **kwargs)
        assert len(found) == 1, found
        return found[0]

    return call


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., str]:
    """A folder with a ``config.json`` and nothing else."""

    def write(folder: str = "draft", **config: Any) -> str:
        path = tmp_path / folder
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
        return str(path)

    return write
