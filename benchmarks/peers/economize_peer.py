"""economize: plain, or its lookup drafter; batch 1 or a ragged batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from protocol import Run, arguments, by_difference, serve, timed


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--lookup", action="store_true", help="draft by lookup, --k tokens at a time")
    args = parser.parse_args()
    serve(lambda: load(args))


def load(args: Any) -> tuple[dict[str, Any], Run]:
    import economize
    import torch
    import transformers
    from economize.techniques.lookup import LookupConfig

    torch.set_num_threads(args.threads)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    base = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    techniques = [LookupConfig(max_ngram=3, min_ngram=1)] if args.lookup else []
    cycle = args.k + 1 if args.lookup else 1
    model = economize.apply(base, *techniques, decoding=economize.DecodeConfig(cycle_length=cycle))

    def run(prompts: Sequence[str], n_tokens: int) -> dict[str, Any]:
        ids = [tokenizer(prompt, return_tensors="pt").input_ids[0] for prompt in prompts]
        _, short_s = timed(lambda: model.decode_batch(ids, 1))
        results, long_s = timed(lambda: model.decode_batch(ids, n_tokens))
        outputs = [result.tokens.tolist() for result in results]
        num_accepted = sum(accepted for result in results for _, accepted in result.acceptance)
        return by_difference(short_s, long_s, outputs, sum(len(each) - 1 for each in outputs) - num_accepted)

    versions = {"economize": economize.__version__, "transformers": transformers.__version__}
    return {"name": "economize", "versions": versions, "config": {"lookup": args.lookup, "k": args.k}}, run


if __name__ == "__main__":
    main()
