"""The llama-cpp-python door: specplug's methods as the ``draft_model`` of ``Llama``.

::

    llama = Llama("model.gguf", n_ctx=2048, draft_model=DraftModel("suffix", num_speculative_tokens=16))

``docs/doors/llama_cpp.md`` is the page. Importing this module imports neither llama-cpp-python nor torch.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specplug.adapters.stand_down import StandDown
from specplug.adapters.token_door import DoorTarget, TokenDoor
from specplug.adapters.tracking import DoorRow, TokenArray
from specplug.hooks import ProcessManager
from specplug.metrics import Metric

__all__ = ["DraftModel"]

_LOGGER = logging.getLogger("specplug.llama_cpp")
_DOOR = "llama.cpp"
_UNKNOWN_VOCABULARY = 2**31 - 1

DRAFT_PRICE, TOKEN_PRICE = 0.5, 0.1
"""Steps of plain decoding that verifying a draft takes, and each token of it: SmolLM2 as Q4_1 on 2 cores."""


class DraftModel:
    """Drafts for llama-cpp-python with a specplug method that needs nothing but token ids.

    ``Llama`` calls it with all tokens so far, once a step, and verifies what it returns; there is no word of a new
    request or of what was accepted, so both are read from the text. It never raises: a fault is logged once and
    counted, and costs drafts only.
    """

    def __init__(
        self,
        method: str | Mapping[str, Any],
        *,
        vocab_size: int | None = None,
        max_model_len: int = 32768,
        plugins: Sequence[Mapping[str, Any] | str] = (),
        draft_price: float = DRAFT_PRICE,
        token_price: float = TOKEN_PRICE,
        manager: ProcessManager | None = None,
        **options: Any,
    ) -> None:
        """``method``: a method's name, the dotted path of a proposer's class, or a whole ``speculative_config``;
        ``options``: further keys of it.

        ``vocab_size``: ``llama.n_vocab()``; not given, ids above the highest seen so far are cut off, which methods
        that copy never notice. ``max_model_len``: longer texts get no drafts. ``draft_price`` and ``token_price``:
        what verifying costs, in steps of plain decoding: a draft whose expected tokens do not pay is dropped.
        Raises ``ConfigError`` with every fault of the configuration, ``PluginError`` for plugins that cannot be built.
        """
        self._rebuild = functools.partial(
            DraftModel,
            method,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            plugins=plugins,
            draft_price=draft_price,
            token_price=token_price,
            **options,
        )
        self._door = TokenDoor(
            _DOOR,
            _speculative_config(method) | options,
            DoorTarget(vocab_size or _UNKNOWN_VOCABULARY, max_model_len),
            plugins=plugins,
            wrappers=[("stand_down", StandDown(draft_price=draft_price, token_price=token_price))],
            manager=manager,
        )
        self._num_ids = vocab_size or 0
        self._knows_vocabulary = vocab_size is not None
        _LOGGER.info(
            'drafting with method "%s", at most %d tokens a step',
            self._door.config.method,
            self._door.num_speculative_tokens,
        )

    def __call__(self, input_ids: TokenArray, /, **_kwargs: Any) -> np.ndarray[Any, np.dtype[np.intc]]:
        """Draft tokens that may follow ``input_ids`` ``[num_tokens]``, as an array; empty for none."""
        if not self._knows_vocabulary:
            self._num_ids = max(self._num_ids, int(input_ids.max(initial=-1)) + 1)
        (draft,) = self._door.step([DoorRow(input_ids)])
        num_known = next((place for place, each in enumerate(draft) if each >= self._num_ids), len(draft))
        return np.array(draft[:num_known], dtype=np.intc)

    @property
    def is_drafting(self) -> bool:
        """Whether drafts may come; False once something failed for good."""
        return not self._door.is_off and self._door.hooks.has_proposer

    @property
    def faults(self) -> Mapping[str, int]:
        """Faults so far: reason -> count."""
        return self._door.hooks.faults

    def metrics(self) -> list[Metric]:
        """Acceptance counts so far, as ``specplug.LLM.get_metrics`` gives them.

        The last step of every request is missing: nothing is shown after it.
        """
        return [] if self._door.acceptance is None else self._door.acceptance.metrics()

    def close(self) -> None:
        """Tell the plugins that the session ends; there are no drafts afterwards. A second call does nothing."""
        self._door.close()

    def __reduce__(self) -> tuple[functools.partial[DraftModel], tuple[()]]:
        """Pickled with its ``Llama``, it comes back without what it has seen."""
        return self._rebuild, ()


def _speculative_config(method: str | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(method, Mapping):
        return dict(method)
    return {"method": "custom_class", "model": method} if "." in method else {"method": method}
