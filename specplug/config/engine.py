"""``EngineArgs``: the engine arguments that act, and the resolution of what the user passed to ``LLM``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from specplug.config.checkpoint import head_fault, read_checkpoint
from specplug.config.engine_terms import ENGINE_TERMS, MOVED
from specplug.config.kernels import KernelsName
from specplug.config.keys import Key, closest, show, term_fault, term_note
from specplug.config.schema import SpeculativeConfig
from specplug.config.unknown import sampling_names
from specplug.config.validation import validate
from specplug.errors import ConfigError

__all__ = ["EngineArgs", "resolve_engine_args"]

DTypeName = Literal["auto", "float32", "float16", "bfloat16"]
_DTYPE_NAMES = {"half": "float16", "float": "float32"}


class EngineArgs(BaseModel):
    """vLLM's engine arguments that act in specplug's host. ``docs/configuration.md`` lists the others."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", arbitrary_types_allowed=True, protected_namespaces=()
    )

    model: Annotated[Any, Key("model")] = Field(
        description="Folder of a Hugging Face causal LM, a loaded model, or an object that implements `Target`."
    )
    tokenizer: Annotated[Any, Key("model")] = Field(
        default=None, description="Folder of the tokenizer, or a loaded one; absent: the model's."
    )
    skip_tokenizer_init: Annotated[bool, Key("model")] = Field(
        default=False, description="Load no tokenizer; prompts and outputs are token ids only."
    )
    dtype: Annotated[DTypeName, Key("model")] = Field(
        default="auto", description="Data type of the weights; auto: the checkpoint's. half and float are understood."
    )
    device: Annotated[str, Key("model")] = Field(
        default="auto", description="cpu, cuda, cuda:1, ...; auto: a GPU if there is one. (specplug's own)"
    )
    revision: Annotated[str | None, Key("model")] = Field(
        default=None, description="Revision of the model, and of its tokenizer unless that has its own."
    )
    tokenizer_revision: Annotated[str | None, Key("model")] = Field(
        default=None, description="Revision of the tokenizer; absent: the model's."
    )
    kernels: Annotated[KernelsName, Key("model")] = Field(
        default="auto",
        description="What runs the forward: torch, or the name of installed kernels such as native; auto: installed "
        "ones that can. (specplug's own)",
    )
    max_model_len: Annotated[int | None, Key("limits")] = Field(
        default=None, ge=1, description="Most tokens of prompt and output together; absent: what the model supports."
    )
    max_num_seqs: Annotated[int, Key("limits")] = Field(
        default=8,
        ge=1,
        description="Most requests decoded at once, at most `max_num_batched_tokens`, to which the default is "
        "lowered; KV memory is reserved for all of them.",
    )
    max_num_batched_tokens: Annotated[int, Key("limits")] = Field(
        default=2048, ge=1, description="Most tokens in one forward, prompt chunks and drafts together."
    )
    seed: Annotated[int, Key("sampling")] = Field(
        default=0, ge=0, description="Seeds the requests that bring no seed of their own."
    )
    additional_config: Annotated[dict[str, Any], Key("plugins")] = Field(
        default_factory=dict, description="A free mapping handed to every plugin."
    )

    @field_validator("dtype", mode="before")
    @classmethod
    def _spell_dtype(cls, value: object) -> object:
        """``torch.bfloat16`` itself and vLLM's short names."""
        name = value if isinstance(value, str) else str(value)
        name = name.removeprefix("torch.")
        return _DTYPE_NAMES.get(name, name)


def resolve_engine_args(model: Any, kwargs: Mapping[str, Any]) -> tuple[EngineArgs, tuple[str, ...]]:
    """The engine arguments that act, and one note for each that is accepted without effect.

    None means "not given". Raises one ``ConfigError`` listing refused, unknown and unsound arguments.
    """
    given = {name: value for name, value in kwargs.items() if value is not None}
    acting = {name: value for name, value in given.items() if name in EngineArgs.model_fields}
    faults: list[str] = []
    notes: list[str] = []
    for name, value in given.items():
        key = ENGINE_TERMS.get(name)
        if key is not None:
            faults += _listed(term_fault(name, value, key))
            notes += _listed(term_note(name, value, key))
        elif name not in acting:
            faults.append(_unknown(name, value))
    if isinstance(model, str) and not model.strip():
        faults.append(f"model={show(model)} names no model; give a folder, a cached hub id, or a loaded model")
    faults += _listed(_head_fault(model))
    args, more = validate(EngineArgs, {"model": model, **acting}, lambda name: name, as_json=False)
    if args is not None:
        args, num_seqs_fault = _fit_num_seqs(args)
        faults += _listed(num_seqs_fault)
    if faults or more or args is None:
        raise ConfigError([*more, *faults])
    return args, tuple(notes)


def _fit_num_seqs(args: EngineArgs) -> tuple[EngineArgs, str | None]:
    """The arguments with the default ``max_num_seqs`` lowered to the token budget; the fault of a given one above."""
    budget = args.max_num_batched_tokens
    if args.max_num_seqs <= budget:
        return args, None
    if "max_num_seqs" not in args.model_fields_set:
        values = {**dict(args), "max_num_seqs": budget}
        return EngineArgs.model_construct(_fields_set=args.model_fields_set, **values), None
    return args, (
        f"max_num_batched_tokens={budget} is below max_num_seqs={args.max_num_seqs}: every running request needs a "
        "token a step; raise the first or lower the second"
    )


def _head_fault(model: object) -> str | None:
    try:
        return head_fault(read_checkpoint(model, "model"), "model")
    except ConfigError:
        return None  # who loads the model says what is wrong with its folder


def _listed(message: str | None) -> list[str]:
    return [] if message is None else [message]


def _unknown(name: str, value: object) -> str:
    if name in MOVED:
        return f"{name}={show(value)}: {MOVED[name]}"
    if name in SpeculativeConfig.model_fields:
        return f"{name} is a key of speculative_config; write speculative_config={{..., {show(name)}: {show(value)}}}"
    if name in sampling_names():
        return f"{name}={show(value)} belongs to each request; pass SamplingParams({name}={value!r}) to generate"
    meant = closest(name, (*EngineArgs.model_fields, *ENGINE_TERMS))
    hint = f"Did you mean {meant}?" if meant else f"Those that act are {', '.join(EngineArgs.model_fields)}."
    return f"unknown engine argument {name}={show(value)}. {hint}"
