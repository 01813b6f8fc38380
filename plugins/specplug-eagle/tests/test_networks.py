"""The networks by hand-made weights, and how a head is fitted to its target."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from specplug_eagle.build import load_head
from specplug_eagle.checkpoint import Checkpoint
from specplug_eagle.testing import LLAMA, QWEN3, Tensors, eagle3_tensors, eagle_tensors, speculators_config

from specplug import LLM
from specplug.errors import ConfigError, ModelError
from specplug.models.cache import RaggedCache
from specplug.models.runner import TargetRunner
from specplug.testing import tiny_llama

MakeHead = Callable[..., Path]
HIDDEN = 32


def target(**overrides: Any) -> TargetRunner:
    return TargetRunner(tiny_llama(**overrides), max_num_seqs=2, max_model_len=64, max_query_tokens=16)


def run(head: Any, token_ids: list[int], states: torch.Tensor) -> torch.Tensor:
    cache = RaggedCache(head.windows, max_num_seqs=1, max_model_len=64, max_query_tokens=16, device=torch.device("cpu"))
    with torch.inference_mode():
        cache.acquire()
        step = cache.begin([len(token_ids)])
        outputs: torch.Tensor = head.run(torch.tensor(token_ids), head.features(states), step, cache)
        cache.end()
    return outputs


def silenced(tensors: Tensors) -> Tensors:
    """Without attention and MLP: what is left is the way through fc and the residual stream."""
    ends = ("o_proj.weight", "down_proj.weight")
    return {name: torch.zeros_like(each) if name.endswith(ends) else each for name, each in tensors.items()}


def test_B142_eagle_reads_the_embedding_first(make_head: MakeHead) -> None:
    first, second = torch.randn(HIDDEN, HIDDEN), torch.randn(HIDDEN, HIDDEN)
    tensors = silenced(eagle_tensors()) | {"fc.weight": torch.cat((first, second), 1)}
    made = target()
    folder = make_head({**LLAMA, "architectures": ["EagleLlamaForCausalLM"]}, tensors)
    head, _ = load_head(Checkpoint.read(folder, "eagle"), made, 64)
    states = torch.randn(3, HIDDEN)
    embedded = made.model.get_input_embeddings().weight[[5, 6, 7]]
    normed = made.model.get_decoder().norm(states)
    expected = embedded @ first.T + normed @ second.T
    torch.testing.assert_close(run(head, [5, 6, 7], states), expected, atol=1e-5, rtol=1e-4)


def test_B142_eagle3_joins_layers_in_ascending_order(make_head: MakeHead) -> None:
    parts = [torch.randn(HIDDEN, HIDDEN) for _ in range(3)]
    tensors = silenced(eagle3_tensors()) | {"fc.weight": torch.cat(parts, 1)}
    folder = make_head(speculators_config(eagle_aux_hidden_state_layer_ids=[2, 0, 1]), tensors)
    head, _ = load_head(Checkpoint.read(folder, "eagle3"), target(), 64)
    assert head.layers == (0, 1, 2)
    states = [torch.randn(2, HIDDEN) for _ in range(3)]
    expected = sum(state @ part.T for state, part in zip(states, parts, strict=True))
    torch.testing.assert_close(run(head, [1, 2], torch.cat(states, 1)), expected, atol=1e-5, rtol=1e-4)


def test_B142_eagle3_attends_over_embedding_then_feature(make_head: MakeHead) -> None:
    """One token attends to itself alone: what comes out is the value projection of both halves."""
    tensors = silenced(eagle3_tensors())
    first, second = torch.randn(16, HIDDEN), torch.randn(16, HIDDEN)
    mix = torch.randn(HIDDEN, HIDDEN)
    tensors |= {"layers.0.self_attn.v_proj.weight": torch.cat((first, second), 1)}
    tensors |= {"layers.0.self_attn.o_proj.weight": mix}
    made = target()
    head, _ = load_head(Checkpoint.read(make_head(speculators_config(), tensors), "eagle3"), made, 64)
    states = torch.randn(1, 3 * HIDDEN)
    feature = states @ tensors["fc.weight"].T

    def norm(values: torch.Tensor, name: str) -> torch.Tensor:
        return values * (values.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * tensors[name]

    embedded = norm(made.model.get_input_embeddings().weight[[9]], "layers.0.input_layernorm.weight")
    values = embedded @ first.T + norm(feature, "layers.0.hidden_norm.weight") @ second.T
    per_head = values.view(1, 2, 1, 8).expand(1, 2, 2, 8).reshape(1, HIDDEN)  # 4 query heads on 2 key heads
    torch.testing.assert_close(run(head, [9], states), feature + per_head @ mix.T, atol=1e-4, rtol=1e-4)


def test_weights_of_both_namings_give_the_same_head(make_head: MakeHead) -> None:
    config = {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    tensors = eagle3_tensors(prefix="midlayer.")
    renamed = {f"model.{name.replace('midlayer.', 'layers.0.')}": each for name, each in tensors.items()}
    states = torch.randn(4, 3 * HIDDEN)
    outputs = []
    for each in (tensors, renamed):
        head, _ = load_head(Checkpoint.read(make_head(config, each), "eagle3"), target(), 64)
        outputs.append(run(head, [1, 2, 3, 4], states))
    assert torch.equal(*outputs)


def test_a_bias_of_fc_is_used(make_head: MakeHead) -> None:
    bias = torch.randn(HIDDEN)
    config = {**LLAMA, "architectures": ["EagleLlamaForCausalLM"]}
    states = torch.randn(2, HIDDEN)
    outputs = []
    for extra in ({}, {"fc.bias": bias}):
        folder = make_head(config, silenced(eagle_tensors()) | extra)
        head, _ = load_head(Checkpoint.read(folder, "eagle"), target(), 64)
        outputs.append(run(head, [1, 2], states))
    torch.testing.assert_close(outputs[1] - outputs[0], bias.expand(2, -1), atol=1e-5, rtol=1e-4)


def test_without_an_output_head_the_targets_rows_are_used(make_head: MakeHead) -> None:
    draft_ids = (3, 9, 11, 40)
    tensors = eagle3_tensors(draft_ids=draft_ids)
    del tensors["lm_head.weight"]
    made = target()
    folder = make_head(speculators_config(draft_vocab_size=4), tensors)
    head, space = load_head(Checkpoint.read(folder, "eagle3"), made, 64)
    outputs = torch.randn(2, HIDDEN)
    with torch.no_grad():
        expected = made.model.get_output_embeddings()(head.norm.bound()(outputs))[:, list(draft_ids)]
        torch.testing.assert_close(head.logits(outputs), expected, atol=1e-5, rtol=1e-4)
    assert space.to_target_ids(torch.tensor([0, 3])).tolist() == [3, 40]


def test_a_head_on_the_last_state_reads_it_normalised(make_head: MakeHead) -> None:
    config = {
        **LLAMA,
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {"use_aux_hidden_state": False},
    }
    tensors = silenced(eagle3_tensors())
    del tensors["fc.weight"]
    made = target()
    head, _ = load_head(Checkpoint.read(make_head(config, tensors), "eagle3"), made, 64)
    assert head.layers == (made.num_layers,)
    states = torch.randn(2, HIDDEN)
    torch.testing.assert_close(run(head, [1, 2], states), made.model.get_decoder().norm(states))


@pytest.mark.parametrize(
    ("config", "tensors", "overrides", "message"),
    [
        pytest.param(
            speculators_config(),
            eagle3_tensors(),
            {"hidden_size": 64},
            "it reads states of width 32, the target's are 64 wide",
            id="target width",
        ),
        pytest.param(
            speculators_config(body={**LLAMA, "hidden_size": 16, "intermediate_size": 24}, target_hidden_size=32),
            eagle3_tensors({**LLAMA, "hidden_size": 16, "intermediate_size": 24}, target_hidden_size=32),
            {},
            "no embeddings of its own, and the target's are 32 wide where its hidden size is 16",
            id="B142 embeddings",
        ),
        pytest.param(
            speculators_config(eagle_aux_hidden_state_layer_ids=[0, 1, 7]),
            eagle3_tensors(),
            {},
            r"it reads the layers \[0, 1, 7\] .eagle_aux_hidden_state_layer_ids in .*, the target has layers 0 to 2",
            id="layer ids",
        ),
        pytest.param(
            speculators_config(eagle_aux_hidden_state_layer_ids=None),
            eagle3_tensors(),
            {},
            r"the default .2, n / 2, n - 3., without eagle_aux_hidden_state_layer_ids in its config.json",
            id="default layer ids",
        ),
        pytest.param(
            speculators_config(),
            eagle3_tensors(),
            {"vocab_size": 80},
            "it knows 64 token ids, the target has 80",
            id="vocabulary",
        ),
    ],
)
def test_heads_that_do_not_fit_the_target(
    config: dict[str, Any], tensors: Tensors, overrides: dict[str, Any], message: str, make_head: MakeHead
) -> None:
    checkpoint = Checkpoint.read(make_head(config, tensors), "eagle3")
    with pytest.raises(ModelError, match=message):
        load_head(checkpoint, target(**overrides), 64)


@pytest.mark.parametrize(("num_layers", "layers"), [(30, (2, 15, 27)), (32, (2, 16, 29)), (9, (2, 4, 6))])
def test_the_layers_that_are_read_where_none_are_named(
    num_layers: int, layers: tuple[int, ...], make_head: MakeHead
) -> None:
    folder = make_head(speculators_config(eagle_aux_hidden_state_layer_ids=None), eagle3_tensors())
    head, _ = load_head(Checkpoint.read(folder, "eagle3"), target(num_hidden_layers=num_layers), 64)
    assert head.layers == layers


def test_logits_are_scaled(make_head: MakeHead) -> None:
    states = torch.randn(3, HIDDEN)
    logits = []
    for keys in ({}, {"logit_scale": 0.5}):
        folder = make_head(speculators_config(**keys), eagle3_tensors())
        head, _ = load_head(Checkpoint.read(folder, "eagle3"), target(), 64)
        logits.append(head.logits(states))
    torch.testing.assert_close(logits[1], 0.5 * logits[0])


def test_a_misfit_ends_the_start_and_not_a_request(make_head: MakeHead) -> None:
    folder = make_head(speculators_config(eagle_aux_hidden_state_layer_ids=[0, 1, 7]), eagle3_tensors())
    with pytest.raises(ModelError, match="does not fit the target"):
        LLM(tiny_llama(), speculative_config={"model": str(folder)})


def test_a_damaged_checkpoint_is_a_fault_of_the_configuration(make_head: MakeHead) -> None:
    """Reported with all other faults, before the target is loaded: there is none in this folder."""
    tensors = eagle3_tensors()
    del tensors["norm.weight"]
    folder = make_head(speculators_config(), tensors)
    with pytest.raises(ConfigError, match=r"tensors are missing: norm.weight"):
        LLM("no/such/target", speculative_config={"model": str(folder)})


def test_method_and_draft_length_come_from_the_checkpoint(make_head: MakeHead) -> None:
    folder = make_head(speculators_config("peagle", mask_token_id=3), eagle3_tensors(is_parallel=True))
    with LLM(tiny_llama(), speculative_config={"model": str(folder)}) as llm:
        config = llm.config
    assert (config.method, config.num_speculative_tokens) == ("eagle3", 3)
    assert config.speculative is not None and config.speculative.parallel_drafting
    assert config.origins["method"] == "inferred: config.json of the draft"
    assert config.origins["num_speculative_tokens"] == "inferred: the proposal count of the draft's config.json"


def test_a_head_with_the_config_of_a_plain_model_is_told_by_its_tensors(make_head: MakeHead) -> None:
    plain = {**LLAMA, "architectures": ["LlamaForCausalLM"]}
    for tensors, method in ((eagle_tensors(), "eagle"), (eagle3_tensors(), "eagle3")):
        settings = {"model": str(make_head(plain, tensors)), "num_speculative_tokens": 2}
        with LLM(tiny_llama(num_hidden_layers=8), speculative_config=settings) as llm:
            assert llm.config.method == method
        with pytest.raises(ConfigError, match=f'declares an EAGLE.* head. Set method="{method}"'):
            LLM(tiny_llama(), speculative_config={**settings, "method": "draft_model"})


def test_qwen3_heads_and_yarn(make_head: MakeHead) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    config = speculators_config(body={**QWEN3, "rope_scaling": rope})
    head, _ = load_head(Checkpoint.read(make_head(config, eagle3_tensors(QWEN3)), "eagle3"), target(), 64)
    assert run(head, [1, 2, 3], torch.randn(3, 3 * HIDDEN)).isfinite().all()
    config = speculators_config(body={**LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}})
    with pytest.raises(ModelError, match='rope_type="dynamic" of the head is not supported; these are: default'):
        load_head(Checkpoint.read(make_head(config, eagle3_tensors()), "eagle3"), target(), 64)


def test_another_activation_is_refused(make_head: MakeHead) -> None:
    config = speculators_config(body={**LLAMA, "hidden_act": "gelu"})
    with pytest.raises(ModelError, match='hidden_act="gelu"'):
        load_head(Checkpoint.read(make_head(config, eagle3_tensors()), "eagle3"), target(), 64)


def test_a_sliding_window_sees_the_last_entries_only(make_head: MakeHead) -> None:
    """With one layer, what is outside the window might as well not exist: positions count by their distance."""
    window = 4
    tensors = eagle3_tensors(QWEN3)
    sliding = {**QWEN3, "use_sliding_window": True, "sliding_window": window, "layer_types": ["sliding_attention"]}
    states = torch.randn(12, 3 * HIDDEN)
    heads = []
    for body in (sliding, QWEN3):
        folder = make_head(speculators_config(body=body), tensors)
        heads.append(load_head(Checkpoint.read(folder, "eagle3"), target(), 64)[0])
    assert heads[0].windows == [window] and heads[1].windows == [None]
    token_ids = list(range(20, 32))
    slid = run(heads[0], token_ids, states)
    torch.testing.assert_close(slid[-1], run(heads[1], token_ids[-window:], states[-window:])[-1], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(slid[-1], run(heads[1], token_ids, states)[-1], atol=1e-2)


def test_importing_the_plugin_loads_no_torch() -> None:
    code = "import sys, specplug_eagle; specplug_eagle.specplug_register(); print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
