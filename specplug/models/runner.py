"""The target behind the loop: a Hugging Face causal LM, driven with packed tokens over our own cache."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import DynamicCache

from specplug.errors import ModelError
from specplug.models.attention import STEP_KEYWORD, borrow_attention, dummy_mask, return_attention
from specplug.models.cache import RaggedCache
from specplug.models.fused import FusedDecoder
from specplug.models.kernels import Decoder, Kernels
from specplug.models.step_plan import StepPlan
from specplug.models.taps import HiddenStateTaps
from specplug.models.target import TargetOutput
from specplug.trees import Tree
from specplug.types import Request

__all__ = ["TargetRunner", "cache_argument", "cannot_drive", "layer_windows"]


def cache_argument(model: Any) -> str | None:
    """The keyword by which ``model.forward`` takes a ``Cache``: transformers renamed it. None if it takes none.

    The signature decides: older versions swallow the new name without using it.
    """
    return next((name for name in ("cache", "past_key_values") if name in _parameters(model)), None)


def _parameters(model: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(model.forward).parameters


def layer_windows(config: Any) -> list[int | None]:
    """Each layer's sliding window, None for full attention, as transformers' own cache derives it."""
    windows: list[int | None] = []
    text_config = config.get_text_config(decoder=True)
    for layer in DynamicCache(config=config).layers:
        is_sliding = getattr(layer, "is_sliding", False)
        windows.append(int(text_config.sliding_window) if is_sliding else None)
    return windows or [None] * int(text_config.num_hidden_layers)


def cannot_drive(config: Any, reason: str) -> ModelError:
    """The error for a model whose type the loop cannot drive, naming the type, why, and what can be driven."""
    return ModelError(
        f'model type "{config.model_type}" cannot be driven by specplug\'s host: {reason}. Use a causal LM whose '
        "layers are full or sliding-window attention (Llama, Qwen, Mistral, Gemma 3, ...)."
    )


class TargetRunner:
    """Implements :class:`specplug.models.target.Target` for a loaded causal LM.

    The model is borrowed: it is switched to our attention function and to eval mode, and given back as it was by
    :meth:`close`. A plain ``model.generate`` on the same object works meanwhile.
    """

    supports_trees = True

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_query_tokens: int,
        decoder: Decoder | None = None,
    ) -> None:
        """``max_query_tokens``: most tokens of one row in one forward (what prompts are cut to); sizes the rings.
        ``decoder``: runs the forward instead of the model.

        Nothing is probed here: :func:`specplug.models.loading.load_target` does that.
        """
        text_config = model.config.get_text_config(decoder=True)
        self.model = model
        self.tokenizer = tokenizer
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.max_query_tokens = min(max_query_tokens, max_model_len)
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.vocab_size = _num_logits(model)
        self.tokenizer_vocab_size: int | None = None if tokenizer is None else len(tokenizer)
        self.eos_token_ids = _eos_token_ids(model)
        self.hidden_size: int | None = getattr(text_config, "hidden_size", None)
        self.num_layers: int | None = getattr(text_config, "num_hidden_layers", None)
        self.cache = RaggedCache(
            layer_windows(model.config),
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_query_tokens=self.max_query_tokens,
            device=self.device,
        )
        self._decoder = decoder or FusedDecoder.of(model, max_model_len)
        self._taps = HiddenStateTaps(model, self.num_layers or 0)
        self._layers: tuple[int, ...] = ()
        self._keywords = self._constant_keywords(text_config)
        self._selects_logits = "logits_to_keep" in _parameters(model)
        self._borrow()
        self._is_open = True
        self._is_suspended = False

    def _borrow(self) -> None:
        try:
            borrow_attention(self.model)
        except ModelError as error:
            raise cannot_drive(self.model.config, str(error)) from error

    def _constant_keywords(self, text_config: Any) -> dict[str, Any]:
        name = cache_argument(self.model)
        if name is None:
            raise cannot_drive(self.model.config, "its forward takes no key-value cache")
        if "position_ids" not in _parameters(self.model):
            raise cannot_drive(self.model.config, "its forward takes no position_ids")
        return {name: self.cache, "use_cache": True, "attention_mask": self._masks(text_config)}

    def _masks(self, text_config: Any) -> torch.Tensor | dict[str, torch.Tensor]:
        windows = [layer.kind.window for layer in self.cache.ragged_layers]
        if getattr(text_config, "layer_types", None) is None:
            return dummy_mask(windows[0], self.device)
        longest = next((window for window in windows if window is not None), 1)
        return {
            "full_attention": dummy_mask(None, self.device),
            "sliding_attention": dummy_mask(longest, self.device),
        }

    def tap(self, layers: Sequence[int]) -> None:
        """Collect hidden states of these layers from the next forward on, instead of those asked for before.

        Layer i is the residual stream after i decoder layers (0: the embeddings), before any final norm. Raises
        ValueError for a layer that the model does not have.
        """
        self._layers = tuple(layers)
        self._taps.set(layers)

    def acquire(self, request: Request) -> int:
        """Give the request the next row, of length 0. Raises ValueError when ``max_num_seqs`` rows are taken."""
        with torch.inference_mode():
            return self.cache.acquire()

    def release(self, row: int) -> int | None:
        """Free ``row``. The last row, if it is another, moves there: returns its old number, else None."""
        with torch.inference_mode():
            return self.cache.release(row)

    def rollback(self, row: int, length: int) -> None:
        """Forget everything past ``length`` tokens of ``row``, an absolute length. Moves no bytes.

        Raises ValueError for a negative length or one above the current.
        """
        self.cache.rollback(row, length)

    def compact(self, rows: Sequence[int], sources: Sequence[int], targets: Sequence[int]) -> None:
        """Let the token at position ``sources[i]`` of ``rows[i]`` stand at position ``targets[i]``, all at once.

        Copies these entries only. Raises ValueError for a move that is not towards the front of what the row holds.
        """
        with torch.inference_mode():
            self.cache.compact(rows, sources, targets)

    def forward(
        self,
        input_ids: torch.Tensor,
        num_query_tokens: Sequence[int],
        logits_indices: torch.Tensor,
        trees: Mapping[int, Tree] | None = None,
    ) -> TargetOutput:
        """Append ``num_query_tokens[row]`` tokens to each row (0 allowed) and run the model over all of them.

        ``input_ids``: ``[T]`` int64 on ``device``, rows in order; ``logits_indices``: int64 on ``device``, which of
        the T positions need logits; ``trees``: row -> the tree that its last ``len(tree)`` tokens form.
        Returns logits ``[num_logits, vocab_size]`` in the model's dtype. Raises ValueError for counts that do not
        fit; the rows keep their lengths if anything is raised.
        """
        if not self._is_open or self._is_suspended:
            state = "suspended" if self._is_open else "closed"
            raise RuntimeError(f"the target is {state}: its model was given back")
        if sum(num_query_tokens) != len(input_ids):
            raise ValueError(f"{len(input_ids)} input ids for {sum(num_query_tokens)} query tokens")
        with torch.inference_mode():
            step = self.cache.begin(num_query_tokens, trees)
            try:
                output = self._run(input_ids, step, logits_indices)
            except ModelError as error:
                raise cannot_drive(self.model.config, str(error)) from error
            finally:
                self.cache.end()
            self.cache.finish(num_query_tokens)
        return output

    def _run(self, input_ids: torch.Tensor, step: StepPlan, logits_indices: torch.Tensor) -> TargetOutput:
        if self._decoder is not None:
            return TargetOutput(*self._decoder.forward(input_ids, step, self.cache, logits_indices, self._layers))
        with self._taps.collect() as hidden_states:
            return TargetOutput(self._run_model(input_ids, step, logits_indices), hidden_states)

    def _run_model(self, input_ids: torch.Tensor, step: StepPlan, logits_indices: torch.Tensor) -> torch.Tensor:
        selection = {"logits_to_keep": logits_indices} if self._selects_logits else {}
        output = self.model(
            input_ids=input_ids[None],
            position_ids=step.position_ids,
            **selection,
            **{STEP_KEYWORD: step},
            **self._keywords,
        )
        if step.num_layers_attended != len(self.cache.ragged_layers):
            raise ModelError("its attention does not go through transformers' AttentionInterface")
        logits: torch.Tensor = output.logits[0]
        return logits if self._selects_logits else logits[logits_indices]

    def suspend(self) -> None:
        """Give the model back as it was until :meth:`resume`; the rows keep their state. Twice is fine."""
        if self._is_open and not self._is_suspended:
            self._is_suspended = True
            self._taps.set(())
            return_attention(self.model)

    def resume(self) -> None:
        """Borrow the model again after :meth:`suspend`."""
        if self._is_open and self._is_suspended:
            self._borrow()
            self._taps.set(self._layers)
            self._is_suspended = False

    @property
    def kernels(self) -> Kernels | None:
        """What runs the forward; None: torch."""
        return None if self._decoder is None else self._decoder.kernels

    def project(self, states: torch.Tensor) -> torch.Tensor:
        """The output embedding, ``[n, hidden]`` to ``[n, vocab]``, as the forward uses it."""
        project = self.model.get_output_embeddings().forward if self._decoder is None else self._decoder.project
        logits: torch.Tensor = project(states)
        return logits

    def keep_for_drafts(self) -> None:
        """Before the first forward: nobody's text depends on the bits of this model's states, only on their speed."""
        if self.kernels is None:
            self.cache.keep_for_drafts()

    def close(self) -> None:
        """Give the model back as it was: its attention implementation, training mode and no hooks. Twice is fine."""
        self.suspend()
        self._is_open = False


def _num_logits(model: Any) -> int:
    head = model.get_output_embeddings()
    return int(head.weight.shape[0] if head is not None else model.config.get_text_config(decoder=True).vocab_size)


def _eos_token_ids(model: Any) -> frozenset[int]:
    ids = getattr(model.generation_config, "eos_token_id", None)
    if ids is None:
        ids = getattr(model.config.get_text_config(decoder=True), "eos_token_id", None)
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)
