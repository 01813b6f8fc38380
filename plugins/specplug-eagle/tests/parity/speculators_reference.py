"""EAGLE-3 and P-EAGLE heads built, saved and run by the ``speculators`` package, to compare ours with.

``python speculators_reference.py FOLDER`` writes, for every variant, a tiny checkpoint as ``speculators`` saves it and,
in a file beside it, texts with the target's states and what that package's own forward drafts after each of them.
Needs ``speculators`` 0.9.0; nothing of specplug is used here.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file

NUM_DRAFT_TOKENS = 4
VOCAB_SIZE = 40
HIDDEN_SIZE = 16
NUM_TARGET_LAYERS = 4
TEXT_LENGTHS = (2, 5, 9)
"""Tokens of each text; the target has read all but the last."""

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"body": "llama", "norm_before_residual": True, "draft_vocab_size": 24},
    "llama-31": {"body": "llama", "fc_norm": True, "norm_output": True, "draft_vocab_size": 24},
    "llama-full": {"body": "llama", "draft_vocab_size": VOCAB_SIZE, "layer_ids": [0, 4]},
    "qwen3": {"body": "qwen3", "norm_before_fc": True, "draft_vocab_size": 24},
    "peagle-llama": {"body": "llama", "kind": "peagle", "num_layers": 2, "draft_vocab_size": VOCAB_SIZE},
    "peagle-qwen3": {"body": "qwen3", "kind": "peagle", "num_layers": 2, "fc_norm": True, "draft_vocab_size": 24},
}


def build(variant: str, seed: int = 0) -> Any:
    """A model of the variant with random weights."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    keys = dict(VARIANTS[variant])
    kind, layer_ids = keys.pop("kind", "eagle3"), keys.pop("layer_ids", [1, 2, 3])
    body = _body(keys.pop("body"), keys.pop("num_layers", 1))
    config_class, model_class = Eagle3SpeculatorConfig, Eagle3DraftModel
    if kind == "peagle":
        config_class, model_class = PEagleSpeculatorConfig, PEagleDraftModel
        keys["mask_token_id"] = 7
    config = config_class(
        transformer_layer_config=body,
        eagle_aux_hidden_state_layer_ids=layer_ids,
        speculators_config=SpeculatorsConfig(
            algorithm=kind,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=NUM_DRAFT_TOKENS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **keys,
    )
    torch.manual_seed(seed)
    model = model_class(config=config).float().eval()
    _randomise(model)
    return model


def _body(kind: str, num_layers: int) -> Any:
    from transformers import LlamaConfig, Qwen3Config

    return {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind](
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=24,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        attn_implementation="eager",
    )


def _randomise(model: Any) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale, middle = (0.1, 1.0) if name.endswith("norm.weight") or "fc_norm" in name else (0.4, 0.0)
            parameter.copy_(middle + scale * torch.randn_like(parameter))
        if model.use_draft_vocab:
            kept = torch.randperm(VOCAB_SIZE)[: model.draft_vocab_size].sort().values
            model.d2t.copy_(kept - torch.arange(model.draft_vocab_size))
            model.t2d.zero_()
            model.t2d[kept] = True


def draft(model: Any, token_ids: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Target ids ``[K]`` and raw logits ``[K, draft_vocab]`` after a text, by the package's own forward.

    ``token_ids`` ``[n + 1]``; ``states`` ``[n, layers * hidden]``: the target's, of all but the last token.
    """
    run = _draft_at_once if hasattr(model, "mask_hidden") else _draft_in_turn
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logits = run(model, token_ids, states)
    return _to_target(model, logits.argmax(-1)), logits


def _to_target(model: Any, draft_ids: torch.Tensor) -> torch.Tensor:
    return draft_ids + model.d2t[draft_ids] if model.use_draft_vocab else draft_ids


def _padded(model: Any, token_ids: torch.Tensor, states: torch.Tensor) -> dict[str, torch.Tensor]:
    """Inputs with room for the draft behind the text; tokens are one ahead of the states."""
    room = NUM_DRAFT_TOKENS
    ids = torch.cat((token_ids[1:], torch.zeros(room, dtype=torch.long)))
    padded = torch.cat((states, torch.zeros(room, states.shape[1])))
    return {
        "hidden_states": padded[None],
        "input_ids": ids[None],
        "document_ids": torch.zeros(1, len(ids), dtype=torch.long),
    }


def _draft_in_turn(model: Any, token_ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Its steps read the tokens that follow in the text; written there, its own drafts are what they read."""
    last = len(states) - 1
    inputs = _padded(model, token_ids, states)
    chosen: list[torch.Tensor] = []
    for depth in range(NUM_DRAFT_TOKENS):
        with _Logits(model) as seen:
            model(**{name: each.clone() for name, each in inputs.items()}, ttt_steps=depth + 1)
        chosen.append(seen[depth][0, last])
        inputs["input_ids"][0, last + 1 + depth] = _to_target(model, chosen[-1].argmax(-1))
    return torch.stack(chosen)


def _draft_at_once(model: Any, token_ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Its training forward on one sampled rollout: the last position and the masks behind it."""
    last = len(states) - 1
    inputs = _padded(model, token_ids, states)
    length = inputs["input_ids"].shape[1]
    anchors = torch.cat((torch.arange(length), torch.full((NUM_DRAFT_TOKENS - 1,), last)))
    depths = torch.cat((torch.zeros(length, dtype=torch.long), torch.arange(1, NUM_DRAFT_TOKENS)))
    core = "speculators.models.peagle.core"
    sample = mock.patch(f"{core}.generate_cod_sample_indices", return_value=(anchors, depths))
    no_loss = mock.patch(f"{core}.compute_metrics", return_value=(None, {}))
    with sample, no_loss, _Logits(model) as seen:
        model(
            **inputs,
            position_ids=torch.arange(length)[None],
            verifier_last_hidden_states=torch.zeros(1, length, HIDDEN_SIZE),
            num_depths=NUM_DRAFT_TOKENS,
        )
    return torch.cat((seen[0][0, last : last + 1], seen[0][0, length:]))


class _Logits:
    """Within it, what the output head returns is collected."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __enter__(self) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        self._handle = self._model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output))
        return seen

    def __exit__(self, *error: object) -> None:
        self._handle.remove()


def expected(model: Any, seed: int = 0) -> dict[str, torch.Tensor]:
    """Texts, states, drafts and logits by name and number."""
    generator = torch.Generator().manual_seed(seed)
    num_inputs = len(model.config.eagle_aux_hidden_state_layer_ids)
    cases: dict[str, torch.Tensor] = {}
    for number, length in enumerate(TEXT_LENGTHS):
        token_ids = torch.randint(VOCAB_SIZE, (length,), generator=generator)
        states = torch.randn(length - 1, num_inputs * HIDDEN_SIZE, generator=generator)
        draft_ids, logits = draft(model, token_ids, states)
        case = {"token_ids": token_ids, "states": states, "draft_ids": draft_ids, "logits": logits}
        cases |= {f"{name}.{number}": each.contiguous() for name, each in case.items()}
    return cases


def write(folder: Path, variant: str, seed: int = 0) -> Path:
    """The variant's checkpoint and expectations, in a folder and a file of its name."""
    model = build(variant, seed)
    target = folder / variant
    model.save_pretrained(target)
    save_file(expected(model, seed), folder / f"{variant}.safetensors")
    for code in target.glob("*.py"):  # transformers saves the config's class beside it
        code.unlink()
    return target


if __name__ == "__main__":
    for each in VARIANTS:
        sys.stdout.write(f"{write(Path(sys.argv[1]), each)}\n")
