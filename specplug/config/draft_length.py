"""K: given, or stated by the draft's checkpoint; and whether the method can draft that many."""

from __future__ import annotations

from collections.abc import Callable

from specplug.config.checkpoint import Checkpoint
from specplug.config.keys import show
from specplug.config.known_methods import MODEL_METHODS
from specplug.config.resolution import PREFIX, Resolution

__all__ = ["K_KEY", "draft_length_text", "resolve_draft_length"]

K_KEY = "num_speculative_tokens"
MAX_DRAFT_LEN = 2**15

_SUFFIX_LENGTH = "suffix_max_draft"
_MEDUSA_TREE = "medusa_tree"
_VLLM_TREE_DEPTH = 24


def draft_length_text(value: object) -> str | None:
    """The message for a K that is 0, which usually means "off"; None for other values."""
    if value != 0 or isinstance(value, bool | float):
        return None
    return (
        f"{PREFIX}.{K_KEY}=0: to run without speculation leave speculative_config out (or per request: "
        'SamplingParams(extra_args={"specplug": {"enabled": False}})).'
    )


def _no_default(work: Resolution) -> str:
    if work.method not in MODEL_METHODS:
        return ""
    if work.checkpoint is None:
        return ", and the draft's checkpoint, which may state it, was not looked at: it is no folder on this disk"
    return " and the draft checkpoint states no default"


def resolve_draft_length(work: Resolution) -> None:
    """Fill in K where the checkpoint states it, and check it against the method's limits."""
    if work.method is None or work.is_unsound(K_KEY):
        return
    if work.num_speculative_tokens is None:
        found = _default(work)
        if found is None and (work.lacks_model or work.method_spec is None):
            return  # already faults, and what is missing might state K
        if found is None:
            work.fault(
                K_KEY,
                f" missing{_no_default(work)}. Start with 3 to 5 for draft models, EAGLE and n-gram.",
            )
            return
        work.infer(K_KEY, *found)
    _check_room(work)
    check = _LIMITS.get(work.method)
    if check is not None and work.num_speculative_tokens is not None:
        check(work, work.num_speculative_tokens)


def _check_room(work: Resolution) -> None:
    """A draft of K tokens follows a prompt, and what is kept of a request may grow with K."""
    num, limit = work.num_speculative_tokens or 0, work.engine.max_model_len
    if limit is not None and num >= limit:
        work.fault(
            K_KEY, f"={num} must be below max_model_len={limit}, which holds prompt and output; 3 to 8 is usual."
        )
    elif num > MAX_DRAFT_LEN:
        work.fault(K_KEY, f"={show(num)} must be at most {MAX_DRAFT_LEN}; 3 to 8 is usual.")


def _default(work: Resolution) -> tuple[int, str] | None:
    if work.method == "suffix":
        return _suffix_default(work)
    if work.method == "extract_hidden_states":
        return 1, "extract_hidden_states keeps the sampled token only"
    if (num_nodes := _medusa_nodes(work)) is not None:
        return num_nodes, f"the nodes of {_MEDUSA_TREE}"
    return None if work.checkpoint is None else _stated(work.method or "", work.checkpoint)


def _medusa_nodes(work: Resolution) -> int | None:
    """Nodes of a tree over Medusa heads, which may be more than there are heads; None for a chain."""
    tree = work.plugin_values.get(_MEDUSA_TREE)
    if isinstance(tree, list | tuple):
        tree = len(tree)
    return tree if isinstance(tree, int) and tree > 0 else None  # else a fault, once the plugin's options are validated


def _suffix_default(work: Resolution) -> tuple[int, str]:
    """As in vLLM the depth of the tree, where one of vLLM's keys is given; otherwise the plugin's own key."""
    depth = work.get("suffix_decoding_max_tree_depth")
    if depth is not None:
        return depth, "suffix_decoding_max_tree_depth"
    field = work.method_spec.options.model_fields.get(_SUFFIX_LENGTH) if work.method_spec is not None else None
    if field is None or any(key.startswith("suffix_decoding_") for key in work.given):
        return _VLLM_TREE_DEPTH, "vLLM's default of suffix_decoding_max_tree_depth"
    given = work.plugin_values.get(_SUFFIX_LENGTH)
    if isinstance(given, int) and given > 0:  # else a fault, once the plugin's options are validated
        return given, _SUFFIX_LENGTH
    return field.default, _SUFFIX_LENGTH


def _stated(method: str, checkpoint: Checkpoint) -> tuple[int, str] | None:
    stated = (
        (checkpoint.proposal_count, "the proposal count of the draft's config.json"),
        (_block_limit(checkpoint), "the block size in the draft's config.json") if method == "dflash" else None,
        (checkpoint.block_size, "the block size in the draft's config.json") if method == "dspark" else None,
        (checkpoint.num_medusa_heads, "the heads in the draft's config.json") if method == "medusa" else None,
        (checkpoint.num_predict_layers, "n_predict of the draft's config.json"),
    )
    return next(((each[0], each[1]) for each in stated if each is not None and each[0]), None)


def _block_limit(checkpoint: Checkpoint) -> int | None:
    """What a DFlash block can draft: slot 0 repeats the anchor unless the drafter samples from it."""
    block = checkpoint.block_size
    return block if block is None or checkpoint.samples_from_anchor else block - 1


def _check_mtp(work: Resolution, num: int) -> None:
    layers = work.checkpoint.num_predict_layers if work.checkpoint else None
    if layers is None or num <= layers:
        return
    if num % layers:
        below = num // layers * layers
        work.fault(
            K_KEY, f"={num}: this MTP draft has {layers} layers, reuse needs a multiple ({below} or {below + layers})."
        )
    else:
        work.notes.append(
            f"{PREFIX}.{K_KEY}={num}: the draft's {layers} MTP layers are reused; acceptance falls there."
        )


def _check_mlp(work: Resolution, num: int) -> None:
    _check_heads(work, num, work.checkpoint.num_predict_layers if work.checkpoint else None, "speculator's")


def _check_medusa(work: Resolution, num: int) -> None:
    if _medusa_nodes(work) is not None:
        return
    _check_heads(work, num, work.checkpoint.num_medusa_heads if work.checkpoint else None, "Medusa heads'")


def _check_heads(work: Resolution, num: int, heads: int | None, what: str) -> None:
    if heads is not None and num > heads:
        work.fault(K_KEY, f"={num} exceeds the {what} {heads}: each head drafts one token; use at most {heads}.")


def _check_dflash(work: Resolution, num: int) -> None:
    limit = _block_limit(work.checkpoint) if work.checkpoint else None
    if work.checkpoint is None or limit is None or num <= limit:
        return
    block = work.checkpoint.block_size
    reason = "slot 0 is the anchor" if limit != block else "positions past it are untrained"
    work.fault(K_KEY, f"={num}: DFlash block {block} drafts {limit} ({reason}); use at most {limit}.")


def _check_dspark(work: Resolution, num: int) -> None:
    block = work.checkpoint.block_size if work.checkpoint else None
    if block is None:
        return
    if num > block:
        work.fault(
            K_KEY, f"={num} is above the block size {block}: later positions are untrained; use at most {block}."
        )
    elif num < block:
        work.notes.append(f"{PREFIX}.{K_KEY}={num} is below the DSpark block size {block}: the rest is not drafted.")


def _check_hidden_states(work: Resolution, num: int) -> None:
    if num != 1:
        work.fault(K_KEY, f'={num}: method "extract_hidden_states" drafts nothing of its own; write 1.')


_LIMITS: dict[str, Callable[[Resolution, int], None]] = {
    "mtp": _check_mtp,
    "mlp_speculator": _check_mlp,
    "medusa": _check_medusa,
    "dflash": _check_dflash,
    "dspark": _check_dspark,
    "extract_hidden_states": _check_hidden_states,
}
