"""vLLM on the CPU, eager: plain, n-gram, suffix, or any class of its ``custom_class``. The engine is stepped in this
process, so steps can be marked."""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import itertools
import json
from collections.abc import Sequence
from typing import Any

from protocol import Marks, Run, arguments, serve

METHODS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    "suffix": {"method": "suffix", "suffix_decoding_max_cached_requests": 0},
}


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--method", default="plain", help=f"{', '.join(METHODS)}, or the dotted path of a class")
    parser.add_argument("--additional-config", default="{}", help="JSON, for classes")
    args = parser.parse_args()
    serve(lambda: load(args))


def load(args: Any) -> tuple[dict[str, Any], Run]:
    import vllm

    settings = METHODS.get(args.method, {"method": "custom_class", "model": args.method})
    config = None if settings is None else {**settings, "num_speculative_tokens": args.k}
    llm = vllm.LLM(
        model=args.model,
        dtype=args.dtype,
        max_model_len=1024,
        max_num_seqs=8,
        speculative_config=config,
        additional_config=json.loads(args.additional_config),
        enforce_eager=True,
        enable_prefix_caching=False,
    )
    numbers = itertools.count()

    def run(prompts: Sequence[str], n_tokens: int) -> dict[str, Any]:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=n_tokens, ignore_eos=True, detokenize=False)
        names = [f"request-{next(numbers)}" for _ in prompts]
        for name, prompt in zip(names, prompts, strict=True):
            llm.llm_engine.add_request(name, prompt, params)
        return _step(llm.llm_engine, names)

    return {"name": "vllm", "versions": {"vllm": vllm.__version__}, "config": config}, run


def _step(engine: Any, names: Sequence[str]) -> dict[str, Any]:
    """Run the engine dry; marks and counts restart until every request has a token."""
    marks = Marks()
    row_steps = 0
    found: dict[str, list[int]] = {name: [] for name in names}
    while engine.has_unfinished_requests():
        is_prompt_phase = not all(found.values())
        new = 0
        for output in engine.step():
            ids = list(output.outputs[0].token_ids)
            if len(ids) > len(found[output.request_id]):
                row_steps += 1
                new += len(ids) - len(found[output.request_id])
                found[output.request_id] = ids
        marks.add(new)
        if is_prompt_phase:
            marks.restart()
            row_steps = 0
    return marks.answer([found[name] for name in names], row_steps)


if __name__ == "__main__":
    main()
