"""Which method a configuration means: named, an alias, or inferred from ``model``."""

from __future__ import annotations

import os
from pathlib import Path

from specplug.config.checkpoint import SPECULATORS_TYPES, folder_fault, read_checkpoint
from specplug.config.keys import show
from specplug.config.known_methods import KNOWN_METHODS, canonical_method, serving_plugin
from specplug.config.resolution import PREFIX, Resolution
from specplug.errors import ConfigError

__all__ = ["resolve_method"]

_NGRAM_MODELS = ("ngram", "[ngram]", "ngram_gpu")
_KIND_WORDS = {
    "eagle": "an EAGLE head",
    "eagle3": "an EAGLE-3 head",
    "mtp": "MTP layers",
    "mlp_speculator": "an MLP speculator",
    "medusa": "Medusa heads",
    "dflash": "a DFlash drafter",
    "dspark": "a DSpark drafter",
}


def resolve_method(work: Resolution) -> None:
    """Set ``method``, ``serving`` and ``checkpoint``; check that ``model`` is there and agrees.

    Of a ``model`` that cannot be, one fault is said; it then counts as unsound, and what depends on it is not checked.
    """
    if work.is_unsound("method", "model"):
        return
    named = work.get("method")
    work.method = None if named is None else _canonical(work, named)
    if work.known_method is None or work.known_method.model in ("draft", "head"):
        _read_draft(work)
    if named is None and not work.is_unsound("model"):
        work.method = _infer(work)
    if work.method is None:
        return
    if work.method == "ngram" and work.get("model") in _NGRAM_MODELS:
        work.values["model"] = None
    if work.method == "custom_class":
        _check_class_path(work)
    _check_model(work)
    _check_agreement(work)
    _infer_parallel(work)
    work.serving = serving_plugin(work.method, parallel_drafting=work.get("parallel_drafting"))


def _read_checkpoint(work: Resolution, path: object, where: str) -> None:
    try:
        work.checkpoint = read_checkpoint(path, where)
    except ConfigError as error:
        work.faults.extend(error.faults)


def _read_draft(work: Resolution) -> None:
    """The checkpoint that ``model`` names, where that is a local folder."""
    model = work.get("model")
    if work.method is None and model in _NGRAM_MODELS:
        return
    is_ours = "method" not in work.given or work.known_method is not None  # a third party's model may be anything
    fault = folder_fault(model, _what(work)) if model is not None and is_ours else None
    if fault is not None:
        work.fault("model", f"={show(model)}: {fault}.")
        return
    num_faults = len(work.faults)
    _read_checkpoint(work, model, f"{PREFIX}.model")
    if len(work.faults) > num_faults:
        work.discard("model")
    elif isinstance(model, str) and work.checkpoint is None and work.known_method is not None:
        work.notes.append(f"{_unread(model)}; it has to be in the local cache of hub ids when the model is loaded.")


def _unread(model: str) -> str:
    return f"{PREFIX}.model={show(model)} is not a local folder, so its config.json was not read"


def _what(work: Resolution) -> str:
    """What the folder that ``model`` names should hold."""
    is_head = work.known_method is not None and work.known_method.model == "head"
    return f'a checkpoint for method "{work.method}"' if is_head else "a Hugging Face causal LM"


def _canonical(work: Resolution, named: str) -> str:
    if named in frozenset(work.methods):
        return named
    method = canonical_method(named)
    if method != named:
        work.notes.append(f'{PREFIX}.method="{named}" is read as "{method}".')
        work.values["method"] = method
    return method


def _infer(work: Resolution) -> str | None:
    model = work.get("model")
    if model is None:
        work.faults.append(
            f'{PREFIX} names neither method nor model: write "method" (such as "ngram"), or "model" with the folder of '
            "a draft; to run without speculation leave speculative_config out."
        )
        return None
    if model in _NGRAM_MODELS:
        method, why = "ngram", f"model={show(model)}"
    elif work.checkpoint is not None:
        unknown = work.checkpoint.unknown_kind
        if unknown is not None:
            kinds = ", ".join(SPECULATORS_TYPES)
            work.fault(
                "model", f"={show(model)}: speculators_model_type={show(unknown)} is not known; known are {kinds}."
            )
            return None
        declared = work.checkpoint.declared_method
        method, why = declared or "draft_model", "config.json of the draft" if declared else "a plain causal LM"
    elif _is_class_path(model):
        method, why = "custom_class", "model is a dotted class path"
    else:
        method, why = "draft_model", "model is given"
        work.notes.append(f'{_unread(model)}; taken as a draft model. Write "method" if it is something else.')
    work.infer("method", method, why)
    return method


def _is_class_path(model: str) -> bool:
    parts = model.split(".")
    return len(parts) >= 2 and all(part.isidentifier() for part in parts)


def _check_class_path(work: Resolution) -> None:
    model = work.get("model")
    needs = 'method="custom_class" needs model="package.module.Class" (importable in *every* worker)'
    if model is None:
        work.faults.append(f"{PREFIX}: {needs}; no model path is given.")
    elif "/" in model or os.sep in model or Path(model).is_dir():
        work.faults.append(f"{PREFIX}: {needs}. {show(model)} is a model id or a folder, not a class.")
    elif not _is_class_path(model):
        hint = f" Write {show(model.replace(':', '.'))}." if _is_class_path(model.replace(":", ".")) else ""
        work.faults.append(f"{PREFIX}: {needs}. {show(model)} is no dotted package.Class path.{hint}")


def _check_model(work: Resolution) -> None:
    known = work.known_method
    if known is None or not work.lacks_model or work.is_unsound("model"):
        return
    if known.package is None and work.method not in frozenset(work.methods):
        return  # nothing serves it, with or without a model
    if not known.model_defaults_to_target:
        what = "draft model" if known.model == "draft" else "heads"
        work.faults.append(f'{PREFIX}: method "{work.method}" needs model, the folder of its {what}; none is given.')
        return
    target = work.engine.model
    if isinstance(target, str | os.PathLike):
        work.infer("model", os.fspath(target), "the target's own checkpoint")
        _read_checkpoint(work, target, "model")


def _check_agreement(work: Resolution) -> None:
    """A checkpoint that declares another method than the one named, or that is no head where one is needed."""
    known = KNOWN_METHODS.get(work.method or "")
    if work.checkpoint is None or known is None or known.model not in ("draft", "head") or "model" not in work.given:
        return
    declared = work.checkpoint.declared_method
    if declared is None and known.model == "head" and not known.model_defaults_to_target:
        _check_is_head(work)
    if declared is None or declared == work.method:
        return
    is_there = KNOWN_METHODS[declared].package is not None or declared in frozenset(work.methods)
    advice = f'Set method="{declared}" or' if is_there else f'specplug has no method "{declared}" yet:'
    fitting = "a causal LM" if known.model == "draft" else f'a checkpoint for "{work.method}"'
    work.faults.append(
        f'You asked for {PREFIX}.method="{work.method}"; the checkpoint {show(work.get("model"))} declares '
        f"{_KIND_WORDS[declared]}. {advice} point model to {fitting}. The folder name was not considered."
    )
    work.discard("model")
    work.checkpoint = None  # of sizes that mean nothing to this method


def _check_is_head(work: Resolution) -> None:
    architecture = work.checkpoint.causal_lm if work.checkpoint else None
    if architecture is None:
        return
    wanted = f"{_KIND_WORDS[work.method or '']} for this target"
    work.faults.append(
        f'{PREFIX}.method="{work.method}" needs {wanted}, and {show(work.get("model"))} is a causal LM of its own '
        f'({architecture}). Write "method": "draft_model" to draft with it, or point model to {wanted}.'
    )
    work.discard("model")
    work.checkpoint = None


def _infer_parallel(work: Resolution) -> None:
    known = work.known_method
    if known is not None and known.parallel:
        work.infer("parallel_drafting", True, f"{work.method} drafts in parallel")
    elif work.checkpoint is not None and work.checkpoint.is_parallel_eagle:
        work.infer("parallel_drafting", True, "config.json of the draft")
