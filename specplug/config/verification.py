"""Which rule verifies the drafts, and the keys that belong to it."""

from __future__ import annotations

from specplug.config.keys import closest, show
from specplug.config.known_methods import CORE, MODEL_METHODS
from specplug.config.resolution import PREFIX, Resolution
from specplug.config.schema import BUILTIN_RULES
from specplug.config.synthetic import length_fault, rates_fault, rates_of_length
from specplug.errors import PluginNotFoundError

__all__ = [
    "PERMISSION",
    "RULE_KEY",
    "check_laws",
    "is_verifier_plugin",
    "missing_package",
    "resolve_rule",
    "resolve_synthetic",
    "switched_off",
]

PERMISSION = "pass allow_lossy=True (on the command line --allow-lossy)"
"""How a lossy plugin is permitted."""

RULE_KEY = "rejection_sample_method"
_SAMPLE_KEY = "draft_sample_method"
_RATES, _LENGTH = "synthetic_acceptance_rates", "synthetic_acceptance_length"

_OLD_RULES = {
    "strict": 'renamed: write "standard"',
    "rejection_sampler": 'renamed: write "standard"',
    "probabilistic": 'it is now draft_sample_method="probabilistic"; the rule is standard, block or synthetic',
    "typical_acceptance_sampler": 'removed from vLLM; write "typical" (plugin package specplug-typical, lossy)',
}
_RULE_PACKAGES = {"typical": "specplug-typical"}


def is_verifier_plugin(work: Resolution) -> bool:
    """Whether the rule is an installed plugin's name."""
    return work.get(RULE_KEY) not in BUILTIN_RULES and work.get(RULE_KEY) in frozenset(work.methods)


def switched_off(work: Resolution, name: str) -> str | None:
    """The fault of a plugin that is installed and that the environment switches off, with what to change."""
    try:
        work.methods[name]
    except PluginNotFoundError as error:
        return f"{error}." if error.is_switched_off else None
    except LookupError:  # of a plain mapping
        return None
    return None


def missing_package(subject: str, name: str, package: str) -> str:
    """The fault of something that a package of specplug's serves which is not installed. The packages are in
    specplug's repository and on no registry, where a package of that name would be a stranger's."""
    served, folder = f"plugin package {package}", f"./plugins/{package}"
    if package == CORE:
        served, folder = f'plugin "{name}" of {CORE} itself', "."
    return (
        f"{subject} is served by the {served}, which is not installed; pip install {folder} in a checkout of specplug "
        "(`specplug plugins` shows what is there, and what is switched off)."
    )


def resolve_rule(work: Resolution) -> None:
    """Set ``verify_method``: "auto" unless a rule is named."""
    if RULE_KEY not in work.values:
        return
    rule = work.get(RULE_KEY)
    if rule in BUILTIN_RULES or is_verifier_plugin(work):
        work.verify_method = rule
    elif rule == "fly":
        work.fault(
            RULE_KEY,
            '="fly": the lossy fly verifier is not part of specplug. vLLM supports it: run there, or leave it out.',
        )
    elif rule in _OLD_RULES:
        work.fault(RULE_KEY, f"={show(rule)}: {_OLD_RULES[rule]}.")
    elif (off := switched_off(work, rule)) is not None:
        work.fault(RULE_KEY, f"={show(rule)}: {off}")
    elif rule in _RULE_PACKAGES:
        work.faults.append(missing_package(f"{PREFIX}.{RULE_KEY}={show(rule)}", rule, _RULE_PACKAGES[rule]))
        work.discard(RULE_KEY)
    else:
        meant = closest(rule, (*BUILTIN_RULES, *work.methods))
        hint = f" Did you mean {meant}?" if meant else ""
        names = ", ".join(BUILTIN_RULES)
        work.fault(RULE_KEY, f"={show(rule)} is neither one of {names} nor an installed verifier plugin.{hint}")


def resolve_synthetic(work: Resolution) -> None:
    """Check the synthetic keys; a length becomes rates."""
    set_keys = [key for key in (_RATES, _LENGTH) if work.given.get(key) is not None]
    if work.is_unsound(RULE_KEY, _RATES, _LENGTH):
        return
    if work.get(RULE_KEY) != "synthetic":
        for key in set_keys:
            work.fault(
                key,
                f' only acts with rejection_sample_method="synthetic" (now {show(work.get(RULE_KEY))}). Remove it or '
                "change the method.",
            )
    elif len(set_keys) != 1:
        which = f"You set {_RATES} *and* {_LENGTH}; keep one" if set_keys else "Set one; length runs from 1 to K+1"
        work.fault(RULE_KEY, f'="synthetic" takes exactly one of {_RATES} and {_LENGTH}. {which}.')
    elif work.num_speculative_tokens is not None:
        _resolve_rates(work, work.num_speculative_tokens)


def _resolve_rates(work: Resolution, num: int) -> None:
    rates, length = work.get(_RATES), work.get(_LENGTH)
    problem = rates_fault(rates, num) if length is None else length_fault(length, num)
    if problem is not None:
        work.faults.append(problem)
    elif length is not None:
        work.infer(_RATES, rates_of_length(length, num), _LENGTH)


def check_laws(work: Resolution) -> None:
    """Lossy plugins without permission, and rules that the drafts' laws cannot feed."""
    for name, spec in work.active.items():
        if not spec.capabilities.lossless and not work.allow_lossy:
            work.faults.append(
                f'plugin "{name}" is lossy: output no longer follows the target\'s distribution. To permit that '
                f"{PERMISSION}, or remove it."
            )
    if work.verify_method == "block" and work.method_spec is not None and not _has_sampled_laws(work):
        work.notes.append(
            f'{PREFIX}.{RULE_KEY}="block" gains only where drafts carry a law (dense or indirect); method '
            f'"{work.method}" has none{_until_probabilistic(work)}, so verification runs per token (metrics: '
            "verify_method_effective)."
        )
    if work.verify_method in ("match", "coupled") and work.get(_SAMPLE_KEY) == "probabilistic":
        work.fault(
            RULE_KEY,
            f'="{work.verify_method}" draws the target\'s token without looking at the law that '
            f'{_SAMPLE_KEY}="probabilistic" keeps, so drafts would be sampled for nothing. Leave {RULE_KEY} out, or '
            f'write "standard" or "block", or {_SAMPLE_KEY}="greedy".',
        )


def _has_sampled_laws(work: Resolution) -> bool:
    """Whether drafts may carry a law: a model's do if it samples them."""
    if work.method_spec is None or not work.method_spec.capabilities.laws & {"dense", "indirect"}:
        return False
    return work.method not in MODEL_METHODS or work.get(_SAMPLE_KEY) == "probabilistic"


def _until_probabilistic(work: Resolution) -> str:
    return f' unless {_SAMPLE_KEY}="probabilistic"' if work.method in MODEL_METHODS else ""
