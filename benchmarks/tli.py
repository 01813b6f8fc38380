"""Cross-vocabulary drafting on a real pair: building the map, and the acceptance that bytes and re-encoding win.

``map``: both directions, ours beside transformers' ``AssistantToTargetTranslator`` in turns, with the numbers of pairs
and of pairs that join different bytes. ``acceptance``: greedy decoding of code and of text beyond ASCII with four draft
spaces, tokens matched by bytes or by strings (as vLLM and transformers do), contexts re-encoded or looked up token by
token (as vLLM does); counts, not times, since this draft costs about as much as the target. Without folders: Gemma 3
270M and SmolLM2 135M, where their packages are installed.

    scripts/bench tli [--part map acceptance] [--models GEMMA3 SMOLLM2] [--rounds 8] [--tokens 48] [--k 3]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from common import circumstances, paired_ratio, wait_until_idle, write_csv
from transformers import AutoConfig, AutoTokenizer

from specplug import LLM, MethodSpec, SamplingParams, hookimpl
from specplug.demo.models import gemma3_path, smollm2_path
from specplug.demo.prompts import load_prompts
from specplug.draft_space import DraftContext, DraftSpace
from specplug.hooks import ProcessManager
from specplug.testing.proposers import MethodPlugin
from specplug.tli import Vocabulary, VocabularyMap, match_vocabularies
from specplug.tli.report import string_pairs
from specplug.tli.space import TliDraftSpace
from specplug.types import TokenIds

Row = dict[str, object]

BEYOND_ASCII = (
    "Als der Zug endlich einfuhr, drängten sich die Reisenden über den Bahnsteig; ein älterer Herr fragte höflich, ob",
    "À l'époque où les étés étaient plus frais, nous passions les vacances près de la forêt, où ma grand-mère",
    "Когда снег наконец растаял, дети выбежали во двор и начали",
    "El señor Muñoz abrió el cajón, sacó un pequeño cuaderno y leyó en voz alta: «Mañana será otro día, y",
    "日本の夏は暑くて湿度が高いので、多くの人は",
    "他打开窗户，看见外面下着雨，于是决定",
)


class TableSpace(TliDraftSpace):
    """The context token by token from the table; what is not in it becomes the unknown token, or the end."""

    def __init__(self, target: Vocabulary, draft: Vocabulary, shared: VocabularyMap) -> None:
        super().__init__(target, draft, shared)
        unknown = draft.tokenizer.unk_token_id
        self._missing = draft.tokenizer.eos_token_id if unknown is None else unknown
        self._seen: dict[str, int] = {}

    def context(self, request_id: str, token_ids: TokenIds) -> DraftContext:
        ids = self.shared.target_to_draft_ids[token_ids.array]
        num_unchanged, self._seen[request_id] = self._seen.get(request_id, 0), len(ids)
        return DraftContext(np.where(ids < 0, self._missing, ids).tolist(), num_unchanged)


def by_strings(target: Vocabulary, draft: Vocabulary) -> VocabularyMap:
    """The map of equal strings."""
    pairs = string_pairs(target, draft)
    to_draft = np.full(target.num_ids, -1, dtype=np.int64)
    to_target = np.full(draft.num_ids, -1, dtype=np.int64)
    to_draft[list(pairs)] = list(pairs.values())
    to_target[list(pairs.values())] = list(pairs)
    return VocabularyMap(to_draft, to_target, len(pairs), {})


SPACES: dict[tuple[str, str], Callable[[Vocabulary, Vocabulary], DraftSpace]] = {
    ("bytes", "re-encoded"): lambda t, d: TliDraftSpace(t, d, match_vocabularies(t, d)),
    ("strings", "re-encoded"): lambda t, d: TliDraftSpace(t, d, by_strings(t, d)),
    ("bytes", "table"): lambda t, d: TableSpace(t, d, match_vocabularies(t, d)),
    ("strings", "table"): lambda t, d: TableSpace(t, d, by_strings(t, d)),
}


# --- building the map -------------------------------------------------------------------------------------------


def measure_maps(folders: Sequence[Path], rounds: int) -> list[Row]:
    rows: list[Row] = []
    tokenizers = {folder: AutoTokenizer.from_pretrained(folder) for folder in folders}
    sizes = {folder: AutoConfig.from_pretrained(folder).get_text_config().vocab_size for folder in folders}
    for target, draft in (folders, folders[::-1]):
        load = wait_until_idle()

        def side(folder: Path) -> Vocabulary:
            return Vocabulary(tokenizers[folder], sizes[folder])

        def ours(target: Path = target, draft: Path = draft) -> VocabularyMap:
            return match_vocabularies(side(target), side(draft))

        def theirs(target: Path = target, draft: Path = draft) -> dict[int, int]:
            return translator_pairs(tokenizers[target], tokenizers[draft], sizes[target])

        seconds: dict[str, list[float]] = {"specplug": [], "transformers": []}
        for _ in range(rounds):
            for name, call in (("specplug", ours), ("transformers", theirs)):
                start = perf_counter()
                call()
                seconds[name].append(perf_counter() - start)
        shared, pairs = ours(), theirs()
        wrong = sum(side_bytes(side(target), t) != side_bytes(side(draft), d) for t, d in pairs.items())
        ratio = paired_ratio(seconds["transformers"], seconds["specplug"])
        counts = {"specplug": (shared.num_by_bytes, 0), "transformers": (len(pairs), wrong)}
        for name, times in seconds.items():
            rows.append(
                {
                    "target": target.name,
                    "draft": draft.name,
                    "implementation": name,
                    "unit": "ms",
                    "median": f"{1e3 * statistics.median(times):.1f}",
                    "most": f"{1e3 * max(times):.1f}",
                    "pairs": counts[name][0],
                    "pairs_of_other_bytes": counts[name][1],
                    "times_faster": f"{ratio.median:.2f}" if name == "specplug" else "",
                    "low95": f"{ratio.low:.2f}" if name == "specplug" else "",
                    **circumstances(load),
                }
            )
            print({key: rows[-1][key] for key in list(rows[-1])[:10]})
    return rows


def translator_pairs(target: Any, draft: Any, vocab_size: int) -> dict[int, int]:
    """Target id -> draft id, as transformers pairs them."""
    from transformers.generation.candidate_generator import AssistantToTargetTranslator

    translator = AssistantToTargetTranslator(target, draft, vocab_size)
    return dict(translator.target_to_assistant_input_ids)


def side_bytes(vocabulary: Vocabulary, token_id: int) -> bytes:
    """Special tokens have none: pairs of them count as right."""
    return vocabulary.bytes_of(token_id)


# --- acceptance ---------------------------------------------------------------------------------------------------


class Opener:
    """Answers ``specplug_draft_space`` in the place of ``tli``."""

    def __init__(self, make: Callable[[Vocabulary, Vocabulary], DraftSpace]) -> None:
        self._make = make

    @hookimpl
    def specplug_draft_space(self, target: Any, draft: Any) -> DraftSpace:
        return self._make(
            Vocabulary(target.tokenizer, target.vocab_size, eos_token_ids=target.eos_token_ids),
            Vocabulary(draft.tokenizer, draft.vocab_size, eos_token_ids=draft.eos_token_ids),
        )


def manager_with(make: Callable[[Vocabulary, Vocabulary], DraftSpace]) -> ProcessManager:
    """The installed plugins, with another one under the name ``tli``."""
    manager = ProcessManager(entry_points=[each for each in entry_points(group="specplug") if each.name != "tli"])
    spec = MethodSpec("tli", "draft_space", lambda config, context: Opener(make))
    manager.register(MethodPlugin(spec), name="tli")
    return manager


def measure_acceptance(target: Path, draft: Path, num_tokens: int, k: int, most: int) -> list[Row]:
    prompts = {"code": [each.text for each in load_prompts()["humaneval"]][:most], "beyond ASCII": BEYOND_ASCII[:most]}
    config = {
        "method": "draft_model",
        "model": str(draft),
        "num_speculative_tokens": k,
        "use_heterogeneous_vocab": True,
    }
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    rows: list[Row] = []
    for (matching, context), make in SPACES.items():
        for kind, texts in prompts.items():
            with LLM(
                str(target),
                speculative_config=config,
                manager=manager_with(make),
                max_num_seqs=len(texts),
                max_model_len=1024,
            ) as llm:
                llm.generate(list(texts), params)
                totals = llm.acceptance.aggregate()
            rows.append(
                {
                    "target": target.name,
                    "draft": draft.name,
                    "text": kind,
                    "tokens_matched_by": matching,
                    "context": context,
                    "num_speculative_tokens": k,
                    "prompts": len(texts),
                    "drafted": totals.num_draft_tokens,
                    "accepted": totals.num_accepted_tokens,
                    "acceptance_rate": f"{totals.draft_acceptance_rate:.3f}",
                    **circumstances(float("nan")),
                }
            )
            print({key: rows[-1][key] for key in list(rows[-1])[:10]}, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=["map", "acceptance"], default=["map", "acceptance"])
    parser.add_argument("--models", nargs=2, type=Path, metavar="FOLDER", help="the larger vocabulary first")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=6, help="most prompts of each kind")
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    folders = arguments.models or [gemma3_path(), smollm2_path()]
    if "map" in arguments.part:
        print(write_csv("tli_map", measure_maps(folders, arguments.rounds)))
    if "acceptance" in arguments.part:
        rows = []
        for target, draft in (folders, folders[::-1]):
            rows += measure_acceptance(target, draft, arguments.tokens, arguments.k, arguments.prompts)
        print(write_csv("tli_acceptance", rows))


if __name__ == "__main__":
    main()
