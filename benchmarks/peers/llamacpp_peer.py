"""llama-cpp-python on a GGUF file: plain, with LlamaPromptLookupDecoding, with specplug's door, or with a draft
model that drafts nothing. Batch 1; tokens come one by one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from protocol import Marks, Run, arguments, serve


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--lookup", action="store_true", help="draft by prompt lookup, --k tokens at a time")
    parser.add_argument("--specplug", metavar="JSON", help="draft by this speculative_config, through specplug's door")
    parser.add_argument(
        "--silent", action="store_true", help="with a draft model that never drafts: what the seam costs"
    )
    args = parser.parse_args()
    serve(lambda: load(args))


def load(args: Any) -> tuple[dict[str, Any], Run]:
    import llama_cpp

    _avoid_amx_buffers(llama_cpp)
    draft = _draft_model(args)
    llm = llama_cpp.Llama(
        args.model,
        n_ctx=1024,
        n_threads=args.threads,
        n_threads_batch=args.threads,
        draft_model=draft,
        logits_all=draft is not None,
        verbose=False,
    )
    num_forwards = _count_forwards(llm)

    def run(prompts: Sequence[str], n_tokens: int) -> dict[str, Any]:
        (prompt,) = prompts
        num_forwards.clear()
        llm.reset()
        marks, ids = Marks(), list[int]()
        for token in llm.generate(llm.tokenize(prompt.encode(), add_bos=False), temp=0.0, top_k=1):
            marks.add(1)
            ids.append(token)
            if len(ids) == n_tokens:
                break
        return marks.answer([ids], len(num_forwards) - 1)

    config = {"lookup": args.lookup, "k": args.k, "specplug": args.specplug}
    return {"name": "llama.cpp", "versions": {"llama_cpp": llama_cpp.__version__}, "config": config}, run


def _draft_model(args: Any) -> Any:
    if args.specplug:
        from specplug.adapters.llama_cpp import DraftModel

        return DraftModel(json.loads(args.specplug))
    if args.lookup:
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        return LlamaPromptLookupDecoding(max_ngram_size=2, num_pred_tokens=args.k)
    if args.silent:
        return _silent
    return None


def _silent(_input_ids: Any, /, **_kwargs: Any) -> Any:
    import numpy as np

    return np.array([], dtype=np.intc)


def _avoid_amx_buffers(llama_cpp: Any) -> None:
    """Builds with GGML_NATIVE crash in ggml's AMX weight buffers on some virtual machines."""
    low = llama_cpp.llama_cpp
    default = low.llama_model_default_params

    def params() -> Any:
        found = default()
        found.use_extra_bufts = False
        return found

    low.llama_model_default_params = llama_cpp.llama_model_default_params = params


def _count_forwards(llm: Any) -> list[None]:
    calls: list[None] = []
    inner = llm.eval

    def counted(tokens: Any) -> None:
        inner(tokens)
        calls.append(None)

    llm.eval = counted
    return calls


if __name__ == "__main__":
    main()
