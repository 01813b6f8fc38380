"""Checkpoints by their configs and by the headers of their weights: published formats load, others say what is wrong.

The manifests are the keys and shapes of published heads; the files hold headers only, since no weight is read here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from specplug_eagle import Eagle3Options, EagleOptions
from specplug_eagle.checkpoint import Checkpoint, HeadConfig, expected_tensors

from specplug.errors import ModelError

Shapes = dict[str, tuple[int, ...]]

LLAMA_8B: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 1,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}


def layer(
    prefix: str, *, hidden: int, inner: int, queries: int, keys: int, width: int, has_norm: bool = True
) -> Shapes:
    shapes: Shapes = {
        "self_attn.q_proj.weight": (queries, width),
        "self_attn.k_proj.weight": (keys, width),
        "self_attn.v_proj.weight": (keys, width),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "post_attention_layernorm.weight": (hidden,),
    }
    if has_norm:
        shapes["input_layernorm.weight"] = (hidden,)
    return {f"{prefix}{name}": shape for name, shape in shapes.items()}


LAYER_8B = {"hidden": 4096, "inner": 14336, "queries": 4096, "keys": 1024}


def eagle_8b() -> tuple[dict[str, Any], Shapes]:
    shapes = layer("layers.0.", **LAYER_8B, width=4096, has_norm=False)
    return dict(LLAMA_8B), {**shapes, "embed_tokens.weight": (128256, 4096), "fc.weight": (4096, 8192)}


def eagle_7b_with_bias() -> tuple[dict[str, Any], Shapes]:
    """Wrapped as vLLM's converter writes it, with a bias and a buffer that old versions saved."""
    body = {**LLAMA_8B, "intermediate_size": 11008, "num_key_value_heads": 32, "vocab_size": 32000}
    config = {"model_type": "eagle", "architectures": ["EagleLlamaForCausalLM"], "model": body, "eagle_fc_bias": True}
    shapes = layer("layers.0.", hidden=4096, inner=11008, queries=4096, keys=4096, width=4096, has_norm=False)
    shapes |= {"embed_tokens.weight": (32000, 4096), "fc.weight": (4096, 8192), "fc.bias": (4096,)}
    return config, {**shapes, "layers.0.self_attn.rotary_emb.inv_freq": (64,)}


def eagle3_8b() -> tuple[dict[str, Any], Shapes]:
    config = {**LLAMA_8B, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000}
    shapes = layer("midlayer.", **LAYER_8B, width=8192)
    shapes |= {"midlayer.hidden_norm.weight": (4096,), "fc.weight": (4096, 12288), "norm.weight": (4096,)}
    return config, {**shapes, "lm_head.weight": (32000, 4096), "d2t": (32000,), "t2d": (128256,)}


def eagle3_70b() -> tuple[dict[str, Any], Shapes]:
    """A head narrower than its target, with embeddings of its own."""
    body = {**LLAMA_8B, "hidden_size": 6144, "intermediate_size": 16384, "num_attention_heads": 48}
    config = {
        **body,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": 32000,
        "target_hidden_size": 8192,
    }
    shapes = layer("midlayer.", hidden=6144, inner=16384, queries=6144, keys=1024, width=12288)
    shapes |= {"midlayer.hidden_norm.weight": (6144,), "fc.weight": (6144, 24576), "norm.weight": (6144,)}
    shapes |= {"lm_head.weight": (32000, 6144), "embed_tokens.weight": (128256, 6144)}
    return config, {**shapes, "d2t": (32000,), "t2d": (128256,)}


def eagle3_with_eagle_config() -> tuple[dict[str, Any], Shapes]:
    """As Model Optimizer writes it: layer ids and a norm before ``fc`` inside ``eagle_config``."""
    nested = {
        "eagle_aux_hidden_state_layer_ids": [1, 15, 28],
        "use_aux_hidden_state": True,
        "norm_before_fc": True,
    }
    config, shapes = eagle3_8b()
    return {**config, "eagle_config": nested}, {**shapes, "input_norm.weight": (12288,)}


def eagle3_of_speculators() -> tuple[dict[str, Any], Shapes]:
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 32000,
        "norm_before_residual": True,
        "target_hidden_size": None,
        "transformer_layer_config": dict(LLAMA_8B),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "meta-llama/Llama-3.1-8B-Instruct"},
        },
    }
    shapes = layer("layers.0.", **LAYER_8B, width=8192)
    shapes |= {"layers.0.hidden_norm.weight": (4096,), "fc.weight": (4096, 12288), "norm.weight": (4096,)}
    shapes |= {"lm_head.weight": (32000, 4096), "embed_tokens.weight": (128256, 4096)}
    return config, {**shapes, "d2t": (32000,), "t2d": (128256,)}


def peagle_20b() -> tuple[dict[str, Any], Shapes]:
    """Four layers, biased projections, a learned stand-in for hidden states."""
    body = {
        **LLAMA_8B,
        "hidden_size": 2880,
        "intermediate_size": 17280,
        "num_attention_heads": 64,
        "num_hidden_layers": 4,
        "head_dim": 64,
        "attention_bias": True,
        "vocab_size": 201088,
    }
    config = {**body, "architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": 201087}
    shapes: Shapes = {}
    for index in range(4):
        prefix, width = f"layers.{index}.", 2880 if index else 5760
        shapes |= layer(prefix, hidden=2880, inner=17280, queries=4096, keys=512, width=width)
        for name, size in {"q": 4096, "k": 512, "v": 512, "o": 2880}.items():
            shapes[f"{prefix}self_attn.{name}_proj.bias"] = (size,)
    shapes |= {"layers.0.hidden_norm.weight": (2880,), "fc.weight": (2880, 8640), "norm.weight": (2880,)}
    return config, {**shapes, "lm_head.weight": (201088, 2880), "mask_hidden": (1, 8640)}


def eagle31_qwen3() -> tuple[dict[str, Any], Shapes]:
    """EAGLE-3.1: a norm for each layer read, fed back normalised; Qwen3's layers."""
    body = {**LLAMA_8B, "model_type": "qwen3", "head_dim": 128, "vocab_size": 151936, "intermediate_size": 12288}
    config, shapes = eagle3_of_speculators()
    config |= {"transformer_layer_config": body, "fc_norm": True, "norm_output": True}
    shapes |= layer("layers.0.", hidden=4096, inner=12288, queries=4096, keys=1024, width=8192)
    shapes |= {f"layers.0.self_attn.{name}_norm.weight": (128,) for name in "qk"}
    shapes |= {f"fc_norm.{number}.weight": (4096,) for number in range(3)}
    return config, {**shapes, "embed_tokens.weight": (151936, 4096), "t2d": (151936,)}


PUBLISHED = {
    "eagle_8b": ("eagle", eagle_8b, {}),
    "eagle_7b_with_bias": ("eagle", eagle_7b_with_bias, {}),
    "eagle3_8b": ("eagle3", eagle3_8b, {"layer_ids": None, "draft_vocab_size": 32000}),
    "eagle3_70b": ("eagle3", eagle3_70b, {"target_hidden_size": 8192}),
    "eagle3_with_eagle_config": (
        "eagle3",
        eagle3_with_eagle_config,
        {"layer_ids": (1, 15, 28), "norm_before_fc": True},
    ),
    "eagle3_of_speculators": ("eagle3", eagle3_of_speculators, {"norm_before_residual": True, "norm_output": False}),
    "eagle31_qwen3": ("eagle3", eagle31_qwen3, {"fc_norm": True, "norm_output": True, "body_type": "qwen3"}),
    "peagle_20b": ("eagle3", peagle_20b, {"mask_token_id": 201087, "num_layers": 4}),
}


def write_manifest(folder: Path, config: Mapping[str, Any], shapes: Shapes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    entries = {
        name: {"dtype": "I64" if name == "d2t" else "BF16", "shape": list(shape), "data_offsets": [0, 0]}
        for name, shape in shapes.items()
    }
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_published_checkpoints_are_understood(name: str, tmp_path: Path) -> None:
    method, manifest, expected = PUBLISHED[name]
    config, shapes = manifest()
    folder = write_manifest(tmp_path, config, shapes)
    checkpoint = Checkpoint.read(folder, method, is_parallel=name.startswith("peagle"))  # type: ignore[arg-type]
    assert {key: getattr(checkpoint.config, key) for key in expected} == expected
    assert expected_tensors(checkpoint.config).keys() <= checkpoint.tensors.keys()


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_every_tensor_that_a_published_head_needs_is_missed(name: str, tmp_path: Path) -> None:
    method, manifest, _ = PUBLISHED[name]
    config, shapes = manifest()
    for dropped in ("fc.weight", "layers.0.mlp.up_proj.weight", "midlayer.mlp.up_proj.weight"):
        if dropped in shapes:
            folder = write_manifest(tmp_path, config, {key: each for key, each in shapes.items() if key != dropped})
            with pytest.raises(ModelError, match=r"tensors are missing: .*(fc|up_proj)\.weight"):
                Checkpoint.read(folder, method)  # type: ignore[arg-type]


def bad(**changes: Any) -> dict[str, Any]:
    return {**eagle3_8b()[0], **changes}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (bad(model_type="mistral"), 'decoder layers are of model_type "mistral"; supported are llama, qwen3'),
        (bad(hidden_size="wide"), "hidden_size='wide'.*must be a whole number"),
        (bad(eagle_aux_hidden_state_layer_ids=[2, 2, 5]), "names a layer twice"),
        (bad(eagle_aux_hidden_state_layer_ids="2"), "must be a list of layer numbers"),
        (bad(eagle_aux_hidden_state_layer_ids=[-1, 2]), "must be a list of layer numbers from 0 on"),
        (bad(norm_before_fc=True, fc_norm=True), "norm_before_fc and fc_norm are both true"),
        (bad(num_aux_hidden_states=2), "num_aux_hidden_states=2 contradicts"),
        (bad(speculators_model_type="dflash"), 'speculators_model_type="dflash" is no head for method "eagle3"'),
        (bad(speculators_model_type="eagle3"), "transformer_layer_config is missing"),
        (bad(draft_vocab_size="32000"), "draft_vocab_size='32000' in its config.json must be a whole number"),
        (bad(target_hidden_size="4096"), "target_hidden_size='4096' in its config.json must be a whole number"),
        (bad(head_dim="128"), "head_dim='128' in its config.json must be a whole number"),
        (bad(eagle_config=[1]), r"eagle_config=\[1\] in its config.json must be a mapping"),
        (bad(logit_scale="x"), "logit_scale='x' in its config.json must be a number above 0"),
        (bad(mask_token_id=-3), "mask_token_id=-3 in its config.json must be one of its token ids, 0 to 128255"),
        (bad(pard_token="7"), "pard_token='7' in its config.json must be one of its token ids"),
        (bad(draft_vocab_size=16000), r'"lm_head.weight" has the shape \[32000, 4096\], and its config says \[16000'),
        (
            bad(target_hidden_size=2048),
            r'"fc.weight" has the shape \[4096, 12288\], and its config says \[4096, 6144\]',
        ),
    ],
)
def test_configs_that_cannot_be(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write_manifest(tmp_path, config, eagle3_8b()[1])
    with pytest.raises(ModelError, match=message) as caught:
        Checkpoint.read(folder, "eagle3")
    assert str(folder) in str(caught.value)


def test_B103_a_reduced_vocabulary_without_its_table(tmp_path: Path) -> None:
    config, shapes = eagle3_8b()
    del shapes["d2t"]
    with pytest.raises(ModelError, match="drafts 32000 of 128256 token ids, and the table d2t"):
        Checkpoint.read(write_manifest(tmp_path, config, shapes), "eagle3")


def test_tensors_of_another_network_are_named(tmp_path: Path) -> None:
    config, shapes = eagle3_8b()
    folder = write_manifest(tmp_path, config, {**shapes, "markov_head.markov_w1.weight": (1, 1)})
    with pytest.raises(ModelError, match="an eagle3 head has no tensors like these: markov_head"):
        Checkpoint.read(folder, "eagle3")


def test_pickles_are_refused_with_the_conversion(tmp_path: Path) -> None:
    config, _ = eagle_8b()
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(ModelError, match=r"pickled weights only \(pytorch_model.bin\).*safetensors.torch"):
        Checkpoint.read(tmp_path, "eagle")


def test_the_conversion_that_is_named_works(tmp_path: Path) -> None:
    import re
    import subprocess
    import sys

    import torch

    config, _ = eagle_8b()
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save({"fc.weight": torch.ones(2, 3).T}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError) as caught:
        Checkpoint.read(tmp_path, "eagle")
    found = re.search(r'python -c "(.*)"', str(caught.value))
    assert found is not None
    subprocess.run([sys.executable, "-c", found.group(1)], cwd=tmp_path, check=True)
    with pytest.raises(ModelError, match=r'"fc.weight" has the shape \[3, 2\]'):
        Checkpoint.read(tmp_path, "eagle")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "not a readable safetensors file"), (b"\xff" * 16, "a header of"), (b"\x02" + b"\x00" * 7 + b"[]", "not a")],
)
def test_damaged_files(content: bytes, message: str, tmp_path: Path) -> None:
    config, shapes = eagle_8b()
    folder = write_manifest(tmp_path, config, shapes)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=message):
        Checkpoint.read(folder, "eagle")


def test_faults_come_with_the_options_before_anything_loads(tmp_path: Path) -> None:
    config, shapes = eagle3_8b()
    folder = write_manifest(tmp_path, config, shapes)
    with pytest.raises(ValidationError, match="mask_hidden") as caught:
        Eagle3Options(model=str(folder), parallel_drafting=True)
    assert "mask token in config.json" in str(caught.value)
    with pytest.raises(ValidationError, match="parallel_drafting needs an EAGLE-3 style head"):
        EagleOptions(model=str(folder), parallel_drafting=True)
    with pytest.raises(ValidationError, match="draft_sample_method"):
        Eagle3Options(model=str(folder), draft_sample_method="often")  # type: ignore[arg-type]


def test_a_mask_of_another_width(tmp_path: Path) -> None:
    config, shapes = eagle3_8b()
    folder = write_manifest(tmp_path, {**config, "mask_token_id": 7}, {**shapes, "mask_hidden": (1, 1, 4096)})
    with pytest.raises(ModelError, match=r'"mask_hidden" has the shape \[1, 1, 4096\], and .* are 12288 wide'):
        Checkpoint.read(folder, "eagle3", is_parallel=True)


def test_what_is_absent_has_vllms_defaults() -> None:
    config = HeadConfig.parse(eagle3_of_speculators()[0] | {"norm_before_residual": True}, "eagle3")
    assert config.layer_ids is None and config.uses_layers and config.target_hidden_size == 4096
    without = {key: each for key, each in eagle3_of_speculators()[0].items() if key != "norm_before_residual"}
    assert HeadConfig.parse(without, "eagle3").norm_before_residual
    assert not HeadConfig.parse({**without, "speculators_model_type": "peagle"}, "eagle3").norm_before_residual
    assert not HeadConfig.parse(eagle3_8b()[0], "eagle3").norm_before_residual
