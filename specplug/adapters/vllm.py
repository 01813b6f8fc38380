"""The vLLM door: specplug's proposers as the class that ``method: custom_class`` names.

::

    vllm serve MODEL --speculative-config '{"method": "custom_class", "num_speculative_tokens": 8,
        "model": "specplug.adapters.vllm.NgramProposer"}'

``docs/doors/vllm.md`` is the page. Importing this module imports neither vLLM nor torch.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from specplug.adapters.step_times import StepTimes
from specplug.adapters.token_door import TokenDoor
from specplug.adapters.tracking import DoorRow
from specplug.adapters.vllm_metrics import MetricsExport, as_own, flat_counts
from specplug.adapters.vllm_options import check_server, read_options, read_target, server_notes
from specplug.adapters.vllm_symbols import TESTED_RELEASES, mismatches
from specplug.metrics import Metric

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["CustomClassProposer", "DraftModelProposer", "NgramProposer", "WorkerExtension"]

_LOGGER = logging.getLogger("specplug.vllm")
_DOOR = "vLLM"


class CustomClassProposer:
    """Answers vLLM's ``custom_class`` calls with a specplug method.

    A subclass names its ``method``; this class takes it from the options. Options come from
    ``additional_config["specplug"]``, the environment variable ``SPECPLUG_VLLM_OPTIONS`` (JSON), and those keys of
    vLLM's ``speculative_config`` that mean the same.

    Once built it never raises: whatever fails is logged once and counted, and costs drafts only. A release of vLLM
    that lacks what is used of it switches drafting off at the start, with the reason.
    """

    method: ClassVar[str] = ""

    def __init__(self, vllm_config: Any) -> None:
        """Raises ``ConfigError`` for options and server settings that cannot be, before weights load."""
        _log_beside_vllm()
        check_server(vllm_config)
        self._options = read_options(vllm_config, self.method)
        self._target = read_target(vllm_config)
        TokenDoor.check(_DOOR, self._options.speculative_config, self._target, plugins=self._options.plugins)
        parallel = getattr(vllm_config, "parallel_config", None)
        self._is_first_rank = getattr(parallel, "rank", 0) == 0
        # Ranks have to draft alike, and their clocks differ; our own host shows no ranks and has its own rule.
        is_alone = getattr(parallel, "world_size", None) == 1
        self._step_times = StepTimes(self._target.device) if is_alone and self._options.step_price is None else None
        self._served_name = getattr(vllm_config.model_config, "served_model_name", None)
        self._notes = server_notes(vllm_config)
        self._reason_off = _release_fault()
        # From here on vLLM may not ask for drafts: one row that could pass max_model_len silences the whole batch.
        self._skip_length = self._target.max_model_len - 2 * (self._options.num_speculative_tokens + 1)
        self._may_have_skipped = False
        self._door: TokenDoor | None = None
        self._export: MetricsExport | None = None

    def load_model(self, target_model: Any) -> None:
        """Build the plugins and let them draft once: vLLM calls this after the target loaded, before it measures
        memory. ``target_model`` is not used."""
        if self._reason_off is not None:
            _LOGGER.error("specplug: no drafts: %s", self._reason_off)
            return
        import torch

        options = self._options
        door = TokenDoor(
            _DOOR,
            options.speculative_config,
            self._target,
            plugins=options.plugins,
            additional_config=options.additional_config,
        )
        with torch.inference_mode():  # as vLLM calls propose
            door.warm_up()
        self._door = door
        if self._is_first_rank:
            self._export = MetricsExport(self.metrics, model_name=self._served_name, port=options.metrics_port)
            self._announce(door)

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """One draft of at most K ids per request, ``[]`` for none.

        ``sampled_token_ids``: what this step gave each request, ``[]`` inside its prompt; ``num_tokens_no_spec``
        ``[max_num_reqs]`` and ``token_ids_cpu`` ``[max_num_reqs, max_model_len]``: the texts with it.
        """
        door = self._door
        if door is None:
            return [[] for _ in sampled_token_ids]
        try:
            lengths = num_tokens_no_spec[: len(sampled_token_ids)].tolist()
            rows = [
                DoorRow(token_ids_cpu[row, :length], num_new=len(sampled))
                for row, (length, sampled) in enumerate(zip(lengths, sampled_token_ids, strict=True))
            ]
            if self._step_times is not None:
                self._step_times.asked(lengths, list(map(len, sampled_token_ids)))
            drafts = door.step(rows, after_a_gap=self._may_have_skipped, step_price=self.step_price)
            self._may_have_skipped = max(lengths, default=0) >= self._skip_length
            if self._step_times is not None:
                self._step_times.answered(lengths, sum(map(len, drafts)))
        except Exception as error:  # noqa: BLE001 - vLLM's engine would die of it
            return self._give_up(error, len(sampled_token_ids))
        return drafts

    @property
    def step_price(self) -> float | None:
        """What a step takes besides its tokens, in tokens, as far as is known; None where ranks could differ in it."""
        return self._options.step_price if self._step_times is None else self._step_times.step_price

    def metrics(self) -> list[Metric]:
        """Acceptance counts so far, under names that begin with ``specplug:``.

        The server does not tell what stop and length cuts took away: the committed counts are the verified ones.
        """
        acceptance = self._door.acceptance if self._door else None
        return [] if acceptance is None else as_own(acceptance.metrics())

    @property
    def is_drafting(self) -> bool:
        """Whether drafts may come; False once something failed for good."""
        return self._door is not None and not self._door.is_off and self._door.hooks.has_proposer

    def _give_up(self, error: Exception, num_rows: int) -> list[list[int]]:
        self._door = None
        _LOGGER.error("specplug's vLLM door failed; no drafts from now on, the server goes on", exc_info=error)
        return [[] for _ in range(num_rows)]

    def _announce(self, door: TokenDoor) -> None:
        _LOGGER.info(
            'specplug: drafting with method "%s", at most %d tokens a step',
            door.config.method,
            door.num_speculative_tokens,
        )
        notes = [*self._notes, *door.config.notes]
        if door.drafts_trees:
            notes.append("vLLM verifies chains: of a token tree one path is proposed; specplug.LLM verifies trees")
        for note in notes:
            _LOGGER.info("specplug: %s", note)


class NgramProposer(CustomClassProposer):
    """Method ``ngram``."""

    method = "ngram"


class DraftModelProposer(CustomClassProposer):
    """Method ``draft_model``; its model, and ``use_heterogeneous_vocab``, come from the options."""

    method = "draft_model"


class WorkerExtension:
    """For ``worker_extension_cls``: ``llm.collective_rpc("specplug_metrics")`` gives every worker's counts."""

    model_runner: Any

    def specplug_metrics(self) -> dict[str, Any]:
        """Metric name and labels -> value, or list by position; {} without one of our proposers."""
        drafter = getattr(self.model_runner, "drafter", None)
        return flat_counts(drafter.metrics()) if isinstance(drafter, CustomClassProposer) else {}


def _release_fault() -> str | None:
    """Why this vLLM cannot be served, None when it can (or when this is not vLLM)."""
    vllm = sys.modules.get("vllm")
    file = getattr(vllm, "__file__", None)
    if file is None:
        return None
    version = getattr(vllm, "__version__", "unknown")
    found = mismatches(Path(file).parent)
    if not found:
        return None
    return (
        f"vLLM {version} differs from the releases this door was written for ({', '.join(TESTED_RELEASES)}): "
        f"{'; '.join(found)}. Use one of those, or a newer specplug"
    )


def _log_beside_vllm() -> None:
    """Our lines go where vLLM's go: its processes set up no other handler."""
    ours, theirs = logging.getLogger("specplug"), logging.getLogger("vllm")
    if theirs.handlers and not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False
