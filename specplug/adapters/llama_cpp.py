"""The llama-cpp-python door: specplug's methods as the ``draft_model`` of ``Llama``.

::

    llama = Llama("model.gguf", n_ctx=2048, draft_model=DraftModel("suffix", num_speculative_tokens=16))

``docs/doors/llama_cpp.md`` is the page. Importing this module imports neither llama-cpp-python nor torch.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specplug.adapters.prices import MeasuredPrices, Prices
from specplug.adapters.stand_down import StandDown
from specplug.adapters.token_door import DoorTarget, TokenDoor
from specplug.adapters.tracking import DoorRow, TokenArray
from specplug.errors import ConfigError
from specplug.hooks import ProcessManager
from specplug.metrics import Metric

__all__ = ["DraftModel"]

_LOGGER = logging.getLogger("specplug.llama_cpp")
_DOOR = "llama.cpp"
_UNKNOWN_VOCABULARY = 2**31 - 1

DRAFT_PRICE, TOKEN_PRICE = 0.5, 0.1
"""Steps of plain decoding that verifying a draft takes, and each token of it, as a first guess: SmolLM2 as Q4_1 takes
0.5 and 0.1 on two cores with matrix instructions, and 0.35 and 0.4 on two without."""


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
        draft_price: float | None = None,
        token_price: float | None = None,
        manager: ProcessManager | None = None,
        **options: Any,
    ) -> None:
        """``method``: a method's name, the dotted path of a proposer's class, or a whole ``speculative_config``;
        ``options``: further keys of it.

        ``vocab_size``: ``llama.n_vocab()``; not given, ids above the highest seen so far are cut off, which methods
        that copy never notice. ``max_model_len``: longer texts get no drafts. ``draft_price`` and ``token_price``:
        what verifying a draft and each token of it costs, in steps of plain decoding: a draft whose expected tokens do
        not pay is dropped. Without them both are measured, from the time between calls.
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
        self.prices = _prices(draft_price, token_price)
        """What drafts cost, as far as is known."""
        self._door = TokenDoor(
            _DOOR,
            _speculative_config(method) | options,
            DoorTarget(vocab_size or _UNKNOWN_VOCABULARY, max_model_len),
            plugins=plugins,
            wrappers=[("stand_down", StandDown(self.prices))],
            manager=manager,
        )
        self._num_ids = vocab_size or 0
        self._knows_vocabulary = vocab_size is not None
        self._last = _Answer(0, 0, 0.0)
        _LOGGER.info(
            'drafting with method "%s", at most %d tokens a step',
            self._door.config.method,
            self._door.num_speculative_tokens,
        )

    def __call__(self, input_ids: TokenArray, /, **_kwargs: Any) -> np.ndarray[Any, np.dtype[np.intc]]:
        """Draft tokens that may follow ``input_ids`` ``[num_tokens]``, as an array; empty for none."""
        self._note_time(len(input_ids))
        if not self._knows_vocabulary:
            self._num_ids = max(self._num_ids, int(input_ids.max(initial=-1)) + 1)
        (draft,) = self._door.step([DoorRow(input_ids)])
        num_known = next((place for place, each in enumerate(draft) if each >= self._num_ids), len(draft))
        self._last = _Answer(len(input_ids), num_known, time.perf_counter())
        return np.array(draft[:num_known], dtype=np.intc)

    def _note_time(self, num_tokens: int) -> None:
        """The step since the last call, unless that was another request's."""
        last = self._last
        if 0 < num_tokens - last.num_tokens <= last.num_draft_tokens + 1:
            self.prices.note(last.num_draft_tokens, time.perf_counter() - last.time_s)

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


class _Answer(NamedTuple):
    """The length of a text, how many tokens were drafted for it, and when."""

    num_tokens: int
    num_draft_tokens: int
    time_s: float


def _prices(draft_price: float | None, token_price: float | None) -> Prices:
    if draft_price is not None and draft_price < 0.0:
        raise ConfigError(f"draft_price={draft_price} cannot be: a draft costs 0 or more steps of plain decoding")
    if token_price is not None and not 0.0 < token_price < 1.0:
        raise ConfigError(
            f"token_price={token_price} cannot be: a draft token costs more than nothing and less than a step of plain "
            "decoding; write a number between 0 and 1"
        )
    if draft_price is None and token_price is None:
        return MeasuredPrices(DRAFT_PRICE, TOKEN_PRICE)
    return Prices(
        DRAFT_PRICE if draft_price is None else draft_price, TOKEN_PRICE if token_price is None else token_price
    )


def _speculative_config(method: str | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(method, Mapping):
        return dict(method)
    return {"method": "custom_class", "model": method} if "." in method else {"method": method}
