"""The SGLang door: specplug's methods as the draft source of SGLang's n-gram worker.

::

    sglang serve MODEL --speculative-algorithm SPECPLUG --speculative-num-draft-tokens 9

SGLang calls :func:`register` in each of its processes, by the entry-point group ``sglang.srt.plugins``. Only the draft
source is replaced: trees, positions, KV slots, verification and sampling are SGLang's own. ``docs/doors/sglang.md``
is the page; the door is tested against SGLang's sources, not in a server.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from specplug.adapters.sglang_symbols import TESTED_RELEASES, mismatches
from specplug.adapters.token_door import DoorTarget, TokenDoor
from specplug.adapters.tracking import DoorRow, TokenArray
from specplug.errors import ConfigError
from specplug.metrics import Metric

__all__ = ["ALGORITHM", "ENVIRONMENT", "DraftSource", "SpecplugWorker", "chain_trees", "register"]

ALGORITHM = "SPECPLUG"
ENVIRONMENT = "SPECPLUG_SGLANG_OPTIONS"
"""Environment variable with a JSON object: the ``speculative_config``, and ``plugins`` if there are any."""

_LOGGER = logging.getLogger("specplug.sglang")
_DOOR = "SGLang"
_DEFAULT = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5}

_NO_CORPORA = f"{ALGORITHM} takes none of SGLang's corpora; use the method's own key, such as suffix_corpus"

Int64s: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


def register() -> None:
    """Make the algorithm ``SPECPLUG`` known to this process of SGLang.

    A release that lacks what is used of it is left alone: nothing is registered, and one error says what is missing.
    """
    import sglang

    found = mismatches(Path(sglang.__file__).parent)
    if found:
        _LOGGER.error(
            "%s is not registered: this SGLang (%s; checked: %s) differs in what is used of it: %s",
            ALGORITHM,
            getattr(sglang, "__version__", "unknown"),
            ", ".join(TESTED_RELEASES),
            "; ".join(found),
        )
        return
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    read_options(os.environ.get(ENVIRONMENT, ""))
    decorate = SpeculativeAlgorithm.register(
        ALGORITHM, supports_overlap=True, spec_class=algorithm_class(CustomSpecAlgo, SpeculativeAlgorithm)
    )
    decorate(_make_worker)


def _make_worker(server_args: Any) -> type:
    from sglang.srt.speculative.ngram_worker import NGRAMWorker

    return worker_class(NGRAMWorker)


def read_options(text: str) -> tuple[dict[str, Any], list[Any]]:
    """``speculative_config`` and plugins from the environment variable's text; "" for the default.

    Raises ``ConfigError`` when it is no JSON object.
    """
    example = f'{ENVIRONMENT}=\'{{"method": "suffix"}}\''
    try:
        options = json.loads(text or json.dumps(_DEFAULT))
    except ValueError as error:
        raise ConfigError(f"{ENVIRONMENT}={text!r} is no JSON ({error}); write {example}") from error
    if not isinstance(options, dict):
        raise ConfigError(f"{ENVIRONMENT}={text!r} is no JSON object; write {example}")
    plugins = options.pop("plugins", [])
    return options, list(plugins)


# --- what SGLang asks of an algorithm ---------------------------------------------------------------------------


class _Algorithm:
    """An algorithm that takes the branches of the built-in n-gram algorithm."""

    def is_ngram(self) -> bool:
        return True

    def has_draft_kv(self) -> bool:
        return False

    def handle_server_args(self, server_args: Any) -> None:
        """Defaults as for n-gram: overlap off on a CPU, tree width, number of running requests."""
        from sglang.srt.arg_groups.speculative_hook import _handle_ngram

        _handle_ngram(server_args)


def algorithm_class(custom: type, enumeration: type) -> type:
    """The class of the registered algorithm.

    SGLang's class for registered algorithms lacks methods that its scheduler calls; they are plain functions of the
    enumeration's, which ask nothing but the predicates that both classes have.
    """
    borrowed = ("carries_draft_hidden_states", "create_future_map", "get_platform_worker_cls", "need_topk")
    members = {name: vars(enumeration)[name] for name in borrowed if not hasattr(custom, name)}
    return type("SpecplugAlgorithm", (_Algorithm, custom), members)


# --- the worker -------------------------------------------------------------------------------------------------


def worker_class(parent: type) -> type:
    """The worker: SGLang's n-gram worker with another draft source."""
    return type("SpecplugNgramWorker", (SpecplugWorker, parent), {})


class SpecplugWorker:
    """The methods that replace those of SGLang's n-gram worker; see :func:`worker_class`."""

    draft_token_num: int
    max_batch_size: int
    enable_overlap: bool
    device: Any
    model_runner: Any
    ngram_corpus: Any

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        """Raises ``ConfigError`` for options that cannot be."""
        super().__init__(server_args, gpu_id, nccl_port, target_worker)  # type: ignore[call-arg]
        corpora = self.ngram_corpus.list_external_corpora()
        if corpora:
            raise ConfigError(f"external corpora ({', '.join(corpora)}): {_NO_CORPORA}")
        self._specplug_options = read_options(os.environ.get(ENVIRONMENT, ""))
        self._specplug_tokenizer = getattr(target_worker, "tokenizer", None)

    def alloc_memory_pool(self, **kwargs: Any) -> None:
        """The sizes are known from here on: build the plugins."""
        super().alloc_memory_pool(**kwargs)  # type: ignore[misc]
        config = self.model_runner.model_config
        spec, plugins = self._specplug_options
        target = DoorTarget(
            vocab_size=config.vocab_size,
            max_model_len=config.context_len,
            max_num_seqs=self.max_batch_size,
            device=str(self.device),
            tokenizer=self._specplug_tokenizer,
        )
        self.ngram_corpus = DraftSource(spec, plugins, target, num_nodes=self.draft_token_num)

    def _prepare_draft_tokens(self, batch: Any) -> tuple[Int64s, Int64s]:
        """Tokens ``[bs * N]`` and ancestor masks ``[bs * N * N]`` of the trees to verify."""
        texts = [_text_of(request, tail) for request, tail in zip(batch.reqs, self._unread_tails(batch), strict=True)]
        source: DraftSource = self.ngram_corpus
        return source.trees([request.rid for request in batch.reqs], texts)

    def _unread_tails(self, batch: Any) -> list[list[int]]:
        """Per request, accepted tokens that are not in ``output_ids`` yet: with overlap, those of the last step."""
        if not self.enable_overlap or batch.grammar_needs_sync():
            return [[] for _ in batch.reqs]
        tokens, stride = batch.spec_info.accept_tokens.tolist(), self.draft_token_num
        lengths = batch.spec_info.accept_lens.tolist()
        return [tokens[row * stride : row * stride + length] for row, length in enumerate(lengths)]

    def _update_ngram_corpus(self, batch: Any) -> None:
        """Nothing to do: texts are read when the next drafts are prepared."""


def _text_of(request: Any, tail: Sequence[int]) -> TokenArray:
    return np.array([*request.origin_input_ids_unpadded, *request.output_ids, *tail], dtype=np.int32)


class DraftSource:
    """Stands in for SGLang's ``NgramCorpus``: drafts from a specplug method, as trees of ``num_nodes`` nodes."""

    def __init__(
        self,
        speculative_config: Mapping[str, Any],
        plugins: Sequence[Mapping[str, Any] | str],
        target: DoorTarget,
        *,
        num_nodes: int,
    ) -> None:
        """Raises ``ConfigError`` for a configuration that cannot be."""
        self._num_nodes = num_nodes
        self._door = TokenDoor(
            _DOOR, {**speculative_config, "num_speculative_tokens": num_nodes - 1}, target, plugins=plugins
        )
        self._door.warm_up()
        self._running: set[str] = set()
        _LOGGER.info('drafting with method "%s", at most %d tokens a step', self._door.config.method, num_nodes - 1)

    def trees(self, request_ids: Sequence[str], texts: Sequence[TokenArray]) -> tuple[Int64s, Int64s]:
        """One tree per request, as :func:`chain_trees` lays them out."""
        drafts = self._door.step([DoorRow(text, key=name) for name, text in zip(request_ids, texts, strict=True)])
        self._running.update(request_ids)
        return chain_trees([int(text[-1]) for text in texts], drafts, self._num_nodes)

    def metrics(self) -> list[Metric]:
        """Acceptance counts so far, as ``specplug.LLM.get_metrics`` gives them."""
        return [] if self._door.acceptance is None else self._door.acceptance.metrics()

    # --- what the parent class calls ----------------------------------------------------------------------------

    def erase_match_state(self, request_ids: Sequence[str]) -> None:
        """Requests have left the batch."""
        for request_id in request_ids:
            self._running.discard(request_id)
            self._door.finish(request_id)

    def reset(self) -> None:
        """All requests are gone."""
        self.erase_match_state(list(self._running))

    def list_external_corpora(self) -> dict[str, int]:
        """There are none."""
        return {}

    def _refuse_corpus(self, corpus_id: str, *_rest: Any) -> int:
        raise ValueError(f"corpus {corpus_id!r}: {_NO_CORPORA}")

    load_external_corpus_named = commit_external_corpus_load = remove_external_corpus = _refuse_corpus


def chain_trees(roots: Sequence[int], drafts: Sequence[Sequence[int]], num_nodes: int) -> tuple[Int64s, Int64s]:
    """Drafts as SGLang's trees of ``num_nodes`` nodes: tokens ``[bs * N]`` and masks ``[bs * N * N]``, flat.

    Node 0 is the newest token of the text, node i the i-th draft token; ``mask[i, j]`` says that j is i or an ancestor
    of i. Nodes that are left over hold token 0 and hang under the root.
    """
    tokens = np.zeros((len(roots), num_nodes), dtype=np.int64)
    masks = np.zeros((len(roots), num_nodes, num_nodes), dtype=np.int64)
    masks[:, np.arange(num_nodes), np.arange(num_nodes)] = 1
    masks[:, :, 0] = 1
    tokens[:, 0] = roots
    for row, draft in enumerate(drafts):
        length = min(len(draft), num_nodes - 1) + 1
        tokens[row, 1:length] = draft[: length - 1]
        masks[row, :length, :length] = np.tri(length, dtype=np.int64)
    return tokens.reshape(-1), masks.reshape(-1)
