"""Train small drafts for a target, on a CPU and from text that lies on any machine.

    python benchmarks/train_tiny_draft.py [--minutes 20] [--only tiny_draft|tiny_draft_tli] [--output FOLDER]

``tiny_draft``: about 5 million parameters with the target's tokenizer, its tied embeddings begun as the principal
directions of the target's. ``tiny_draft_tli``: the same size with a byte-level BPE of its own (8192 tokens), for
drafting across vocabularies. Both learn from the standard library's sources and the language reference, and from the
target's greedy continuations of prompts made of them (``training/texts.py``; no benchmark's prompt is among them),
which are made first and shared with ``train_heads.py``. Each becomes an ordinary Hugging Face folder with a
``training.json`` beside: times, losses, and the acceptance on held-out continuations.

A minute is one of two busy cores, counted in CPU time; the continuations take their share of it once.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from training.budget import CORES, Budget, write_report
from training.corpus import Corpus, make_corpus, open_corpus
from training.corpus import Sequence as Continuation
from training.draft import Example, acceptance, hard_example, new_draft, principal_embeddings, train
from training.texts import natural_texts
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specplug.demo.models import default_cache_dir, smollm2_path

CORPUS_SHARE = 0.4
"""Of the minutes, for the continuations."""
NATURAL_CHARACTERS = 6_000_000
ROW_TOKENS = 256
OWN_VOCABULARY = 8192
PROMPT_WEIGHT = 0.3
"""Of a prompt's tokens in the loss where the target's opinion on them is not known."""


def main() -> None:
    args = arguments(__doc__, minutes=20.0, choices=list(MAKERS))
    target: Any = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.bfloat16)
    corpus, corpus_times = prepare(args, target)
    for name in args.only or MAKERS:
        budget = Budget(args.minutes * (1 - CORPUS_SHARE))
        print(f"{name}: {budget.minutes:.1f} minutes of {CORES} cores", flush=True)
        model, tokenizer, found = MAKERS[name](args.target, target, corpus, budget)
        folder = Path(args.output) / name
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        write_report(folder, {"name": name, **found, "training": budget.times(), "continuations": corpus_times})


def arguments(description: str | None, *, minutes: float, choices: Sequence[str]) -> argparse.Namespace:
    """The command line of both training scripts, with the defaults filled in and the threads set."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes", type=float, default=minutes, help="of two cores, for each model (default: %(default)g)"
    )
    parser.add_argument("--output", help="folder for all of it (default: trained/ in specplug's cache)")
    parser.add_argument("--target", help="folder of the target (default: the demo model)")
    parser.add_argument("--only", action="append", choices=choices)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    cache = default_cache_dir(os.environ)
    args.output = args.output or str(cache / "trained")
    args.target = args.target or str(smollm2_path(cache))
    torch.set_num_threads(args.threads)
    return args


def prepare(args: argparse.Namespace, target: Any) -> tuple[Corpus, dict[str, float]]:
    """The continuations, made where they are not there yet, and what they took in all."""
    folder = Path(args.output) / "corpus"
    times = folder / "times.json"
    if not times.is_file():
        budget = Budget(args.minutes * CORPUS_SHARE)
        print(f"continuations: {budget.minutes:.1f} minutes of {CORES} cores", flush=True)
        num_tokens = make_corpus(args.target, folder, budget)
        open_corpus(folder, target)  # computes the opinions
        times.write_text(json.dumps({"tokens": num_tokens, **budget.times()}))
    corpus = open_corpus(folder, target)
    print(
        f"continuations: {len(corpus.train)} + {len(corpus.held_out)} held out, {corpus.num_tokens} tokens", flush=True
    )
    return corpus, json.loads(times.read_text())


# --- with the target's tokenizer ------------------------------------------------------------------------------

Made = tuple[Any, Any, dict[str, Any]]
"""Model, tokenizer, and what is reported."""


def tiny_draft(folder: str, target: Any, corpus: Corpus, budget: Budget) -> Made:
    """Hidden size 96: nearly all of the 5 million parameters are embeddings, and they cost one matrix product."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    embeddings = target.get_input_embeddings().weight
    config = _config(target, tokenizer, vocab_size=len(embeddings), hidden_size=96, intermediate_size=480, num_layers=2)
    model = new_draft(config, principal_embeddings(embeddings, 96))
    natural = [hard_example(row) for row in _rows(natural_ids(tokenizer))]
    found = train(model, natural, [_opinion(sequence) for sequence in corpus.train], budget)
    held = acceptance(model, [_opinion(sequence) for sequence in corpus.held_out])
    return model, tokenizer, _about(model, found, held)


def _opinion(sequence: Continuation) -> Example:
    """The target's opinion at every position, prompt included."""
    probs = sequence.top_log_probs.softmax(-1)
    return Example(sequence.token_ids, sequence.top_ids, probs, sequence.outputs)


# --- with a tokenizer of its own ------------------------------------------------------------------------------


def tiny_draft_tli(folder: str, target: Any, corpus: Corpus, budget: Budget) -> Made:
    """A small vocabulary leaves the parameters to the layers."""
    target_tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    texts = [_text(target_tokenizer, sequence) for sequence in corpus.train]
    tokenizer = own_tokenizer(target_tokenizer, [prompt + output for prompt, output in texts])
    embeddings = _embeddings_of_texts(tokenizer, target_tokenizer, target)
    config = _config(target, tokenizer, vocab_size=len(tokenizer), hidden_size=320, intermediate_size=896, num_layers=2)
    model = new_draft(config, principal_embeddings(embeddings, 320))
    natural = [hard_example(row) for row in _rows(natural_ids(tokenizer))]
    found = train(model, natural, [_written(tokenizer, *text) for text in texts], budget)
    held_out = [_written(tokenizer, *_text(target_tokenizer, sequence)) for sequence in corpus.held_out]
    return model, tokenizer, _about(model, found, acceptance(model, held_out))


def own_tokenizer(target_tokenizer: Any, texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of ``OWN_VOCABULARY`` tokens, digits apart, with the target's special tokens and template."""
    special = list(target_tokenizer.all_special_tokens)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=OWN_VOCABULARY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*_natural_prefix(), *texts], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=target_tokenizer.bos_token,
        eos_token=target_tokenizer.eos_token,
        pad_token=target_tokenizer.pad_token or target_tokenizer.eos_token,
        additional_special_tokens=special,
        chat_template=getattr(target_tokenizer, "chat_template", None),
        clean_up_tokenization_spaces=False,
    )


def _embeddings_of_texts(tokenizer: Any, target_tokenizer: Any, target: Any) -> torch.Tensor:
    """For each token the mean of the target's embeddings of its text."""
    weights = target.get_input_embeddings().weight.float()
    texts = [tokenizer.decode([token_id]) for token_id in range(len(tokenizer))]
    ids = target_tokenizer(texts, add_special_tokens=False)["input_ids"]
    return torch.stack([weights[row].mean(0) if row else weights.new_zeros(weights.shape[1]) for row in ids])


def _text(tokenizer: Any, sequence: Continuation) -> tuple[str, str]:
    """Prompt and continuation."""
    prompt = tokenizer.decode(sequence.token_ids[: sequence.num_prompt_tokens])
    return prompt, tokenizer.decode(sequence.token_ids)[len(prompt) :]


def _written(tokenizer: Any, prompt: str, output: str) -> Example:
    """Tokens of the whole text; those of the prompt weigh less, since the target did not write them."""
    encoded = tokenizer(prompt + output, add_special_tokens=False, return_offsets_mapping=True)
    example = hard_example(torch.tensor(encoded["input_ids"]))
    num_prompt = sum(start < len(prompt) for start, _ in encoded["offset_mapping"])
    example.label_probs[: num_prompt - 1] *= PROMPT_WEIGHT
    judged = (num_prompt - 1, len(example.token_ids) - 1)
    return Example(example.token_ids, example.label_ids, example.label_probs, judged)


# --- both -----------------------------------------------------------------------------------------------------

MAKERS: dict[str, Callable[[str, Any, Corpus, Budget], Made]] = {
    "tiny_draft": tiny_draft,
    "tiny_draft_tli": tiny_draft_tli,
}


def _config(
    target: Any, tokenizer: Any, *, vocab_size: int, hidden_size: int, intermediate_size: int, num_layers: int
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 32,
        head_dim=32,
        max_position_embeddings=target.config.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def natural_ids(tokenizer: Any) -> torch.Tensor:
    """The natural texts as one row of tokens, each ended."""
    ids: list[int] = []
    for text in _natural_prefix():
        ids += [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return torch.tensor(ids)


def _natural_prefix() -> Iterator[str]:
    left = NATURAL_CHARACTERS
    for text in natural_texts():
        if left > 0:
            yield text
        left -= len(text)


def _rows(ids: torch.Tensor) -> Iterator[torch.Tensor]:
    return (row for row in torch.split(ids, ROW_TOKENS) if len(row) > 1)


def _about(model: LlamaForCausalLM, found: dict[str, Any], held: Any) -> dict[str, Any]:
    return {"parameters": model.num_parameters(), **found, "held_out": asdict(held)}


if __name__ == "__main__":
    main()
