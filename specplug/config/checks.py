"""What keys mean together: which method may use which, lookup bounds, vocabularies, lengths and budgets."""

from __future__ import annotations

from specplug.config.engine_terms import NO_TOKENIZER
from specplug.config.fit import check_fit, target_checkpoint
from specplug.config.keys import key_of, show
from specplug.config.resolution import PREFIX, Resolution
from specplug.config.schedule import SCHEDULE_KEY, parse_schedule
from specplug.config.schema import SpeculativeConfig
from specplug.errors import ConfigError

__all__ = ["check_together", "check_usage", "clamp_schedule", "read_schedule"]


def check_usage(work: Resolution) -> None:
    """Keys that the chosen method does not read."""
    if work.method is None or (work.known_method is None and work.method_spec is None):
        return  # of a method that is not there nobody knows what it reads
    for key, value in list(work.values.items()):
        if key not in work.given or work.read_by_plugins(key):
            continue
        rule = key_of(SpeculativeConfig.model_fields[key])
        if rule.used_by is None or rule.term == "refused" or rule.asks_nothing(value):
            continue
        if not _readers(work) & rule.used_by:
            work.fault(key, f' is not used by method "{work.method}" and would be ignored; remove it.')


def _readers(work: Resolution) -> frozenset[str]:
    """The table's names under which the method reads keys; a third party's model method reads as draft_model."""
    spec = work.method_spec
    if work.known_method is None and spec is not None and spec.capabilities.needs_draft_model:
        return frozenset({"draft_model"})
    return frozenset(name for name in (work.method, work.serving) if name)


def check_together(work: Resolution) -> None:
    """Every check that needs more than one key, once method and K are known."""
    _resolve_lookup(work)
    _check_vocabulary(work)
    _check_tensor_parallel(work)
    _check_context(work)
    _check_budget(work)
    check_fit(work)


def _resolve_lookup(work: Resolution) -> None:
    """Both bounds absent: 5; one absent: the same as the other."""
    longest, shortest = "prompt_lookup_max", "prompt_lookup_min"
    if work.method != "ngram" or work.is_unsound(longest, shortest):
        return
    high, low = work.get(longest), work.get(shortest)
    if high is None and low is None:
        work.values.update({longest: 5, shortest: 5})
        work.notes.append(
            f"{longest} and {shortest} not given, using 5 for both. Set a lower {shortest} for more matches."
        )
    elif low is None:
        work.infer(shortest, high, f"same as {longest}")
        work.notes.append(f"{shortest} not given, using {high} (same as max). Set 1 for more, weaker matches.")
    elif high is None:
        work.infer(longest, low, f"same as {shortest}")
        work.notes.append(f"{longest} not given, using {low} (same as min). Set more for longer, better matches.")
    elif low > high:
        work.fault(
            shortest,
            f"={low} is above prompt_lookup_max={high}. They are the shortest and longest *match*; the draft length is "
            "num_speculative_tokens.",
        )


def _check_vocabulary(work: Resolution) -> None:
    key = "use_heterogeneous_vocab"
    if not work.get(key):
        return
    if work.get("use_local_argmax_reduction"):
        work.fault(
            key,
            " and use_local_argmax_reduction are mutually exclusive: a local arg-max skips the vocabulary's mask "
            "and id map. Remove use_local_argmax_reduction.",
        )
    if not work.has_own_vocabulary:
        work.fault(
            key,
            f' needs a method with its own draft model (draft_model, ...); method "{work.method}" has none. Remove the '
            "key.",
        )
    elif work.engine.skip_tokenizer_init:
        work.fault(key, f" compares the tokenizers of both models; {NO_TOKENIZER}.")
    elif work.checkpoint is not None and not work.checkpoint.has_tokenizer:
        work.fault(
            key,
            f' compares the tokenizers of both models, and the draft folder "{work.checkpoint.folder}" holds none. Put '
            "the draft's tokenizer.json there.",
        )


def _check_tensor_parallel(work: Resolution) -> None:
    size = work.get("draft_tensor_parallel_size")
    if size not in (None, 1):
        work.fault(
            "draft_tensor_parallel_size",
            f" may be 1 (the target's value in this host); got {size}. vLLM supports more: run there, or write 1.",
        )


def _check_context(work: Resolution) -> None:
    """The draft's ``max_model_len`` against the draft's and the target's own."""
    wanted = work.get("max_model_len")
    if wanted is None:
        return
    draft = work.checkpoint.max_positions if work.checkpoint else None
    checkpoint = target_checkpoint(work)
    target = work.engine.max_model_len or (checkpoint.max_positions if checkpoint else None)
    limits = [limit for limit in (draft, target) if limit is not None]
    if limits and wanted > min(limits):
        parts = [f"draft supports {draft}"] if draft else []
        parts += [f"target runs at {target}"] if target else []
        work.fault(
            "max_model_len",
            f"={wanted}: {', '.join(parts)}; use at most {min(limits)}. Longer requests run without drafting.",
        )


def _slots_per_request(work: Resolution, num: int) -> int:
    """Tokens that a request adds to the draft's forward, beside those that the target reads as well."""
    if work.method in ("dflash", "dspark") or work.serving == "pard":
        return num
    if work.method in ("eagle", "eagle3"):
        return num - 1 if work.get("parallel_drafting") else 0
    return 1 if work.method == "draft_model" else 0


def _check_budget(work: Resolution) -> None:
    num = work.num_speculative_tokens
    if num is None:
        return
    slots, requests = _slots_per_request(work, num), work.engine.max_num_seqs
    needed, budget = slots * requests, work.engine.max_num_batched_tokens
    if needed >= budget:
        work.faults.append(
            f"{PREFIX}.num_speculative_tokens={num}: drafting needs {slots} slots × {requests} requests = {needed} "
            f"tokens per step but max_num_batched_tokens is {budget}. Raise it to >= {needed + budget}, or lower "
            "max_num_seqs or num_speculative_tokens."
        )


def read_schedule(work: Resolution, value: object) -> None:
    """The batch-size schedule, into ``values`` where it is sound."""
    try:
        work.values[SCHEDULE_KEY] = parse_schedule(value)
    except ConfigError as error:
        work.faults.extend(error.faults)


def clamp_schedule(work: Resolution) -> None:
    """Lower schedule entries above K to K, saying so."""
    schedule, num = work.get(SCHEDULE_KEY), work.num_speculative_tokens
    if schedule is None or num is None or all(each <= num for _, _, each in schedule):
        return
    work.values[SCHEDULE_KEY] = tuple((first, last, min(each, num)) for first, last, each in schedule)
    work.notes.append(
        f"{PREFIX}.{SCHEDULE_KEY}: entries above num_speculative_tokens={num} are lowered to it: "
        f"{show(work.values[SCHEDULE_KEY])}."
    )
