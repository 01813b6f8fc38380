"""Which method a configuration means."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest
from pydantic import BaseModel, model_validator

from specplug.config import resolve_engine_args
from specplug.config.known_methods import KNOWN_METHODS
from specplug.errors import ConfigError, PluginNotFoundError
from specplug.hooks import ProcessManager
from specplug.methods import MethodSpec
from specplug.testing import tiny_llama

PLUGINS = Path(__file__).parents[2] / "plugins"
PLAIN = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 2048}


class HeadOptions(BaseModel):
    """Like the heads' plugins: ``model`` is required, and looked into."""

    model: str
    draft_sample_method: str = "greedy"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if Path(self.model).exists():
            raise ValueError("the heads cannot be used")
        return self


@pytest.fixture
def heads(methods: Any) -> dict[str, MethodSpec]:
    """The installed plugins; those with a model have such options."""
    return {
        name: replace(each, options=HeadOptions) if each.capabilities.needs_draft_model else each
        for name, each in ((name, methods[name]) for name in methods)
    }


@pytest.mark.parametrize("name", ["ngram", "ngram_gpu", "[ngram]"])
def test_ngram_names(resolve: Any, name: str) -> None:
    by_method = resolve({"method": name, "num_speculative_tokens": 3})
    by_model = resolve({"model": name, "num_speculative_tokens": 3})
    assert by_method.method == by_model.method == "ngram"
    assert by_method.speculative.method == "ngram"
    assert by_model.speculative.model is None
    assert by_model.origins["method"].startswith("inferred")
    assert (f'"{name}" is read as "ngram"' in " ".join(by_method.notes)) == (name != "ngram")


def test_method_and_its_own_name_as_model(resolve: Any) -> None:
    assert resolve({"method": "ngram", "model": "[ngram]", "num_speculative_tokens": 3}).speculative.model is None


@pytest.mark.parametrize("alias", ["deepseek_mtp", "qwen3_next_mtp"])
def test_mtp_aliases(resolve: Any, alias: str) -> None:
    assert resolve({"method": alias, "num_speculative_tokens": 1}).method == "mtp"


def test_dotted_path_is_a_custom_class(resolve: Any) -> None:
    resolved = resolve({"model": "package.Class", "num_speculative_tokens": 2})
    assert resolved.method == "custom_class"
    assert resolved.origins["method"] == "inferred: model is a dotted class path"


@pytest.mark.parametrize("model", ["org/name", "Qwen2.5-0.5B", "name"])
def test_hub_id_is_a_draft_model_and_says_so(resolve: Any, model: str) -> None:
    resolved = resolve({"model": model, "num_speculative_tokens": 2})
    assert resolved.method == "draft_model"
    assert any("config.json was not read" in note for note in resolved.notes)


def test_a_named_method_with_what_is_no_local_folder(resolve: Any) -> None:
    resolved = resolve({"method": "draft_model", "model": "some/where", "num_speculative_tokens": 2})
    (note,) = [note for note in resolved.notes if "config.json was not read" in note]
    assert "it has to be in the local cache of hub ids" in note


def test_a_kind_of_speculators_checkpoint_that_is_not_known(fault: Any, checkpoint: Any) -> None:
    folder = checkpoint("head", speculators_model_type="foo")
    text = fault({"model": folder, "num_speculative_tokens": 2})
    assert f'model="{folder}": speculators_model_type="foo" is not known; known are eagle, eagle3, peagle' in text


@pytest.mark.parametrize(
    ("config", "method"),
    [
        (PLAIN, "draft_model"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, "eagle3"),
        ({"model_type": "eagle", "architectures": ["EagleLlamaForCausalLM"]}, "eagle"),
        ({"model_type": "llama", "eagle_config": {"use_aux_hidden_state": True}}, "eagle3"),
        ({"speculators_model_type": "eagle3"}, "eagle3"),
        ({"speculators_model_type": "peagle"}, "eagle3"),
        ({"speculators_model_type": "dflash2"}, "dflash"),
        ({"architectures": ["DFlashDraftModel"], "block_size": 8}, "dflash"),
        ({"architectures": ["Qwen3DSparkModel"], "block_size": 7}, "dspark"),
        ({"model_type": "mlp_speculator"}, "mlp_speculator"),
        ({"medusa_num_heads": 5}, "medusa"),
        ({"model_type": "deepseek_mtp", "architectures": ["DeepSeekMTPModel"]}, "mtp"),
        ({"model_type": "gemma4_assistant"}, "mtp"),
        (PLAIN | {"num_nextn_predict_layers": 1}, "draft_model"),
        ({"model_type": "llama", "architectures": None}, "draft_model"),
    ],
)
def test_inferred_from_the_contents(resolve: Any, checkpoint: Any, config: dict[str, Any], method: str) -> None:
    resolved = resolve({"model": checkpoint(**config), "num_speculative_tokens": 1})
    assert resolved.method == method
    assert resolved.origins["method"].startswith("inferred:")


def test_B19_folder_name_is_not_considered(resolve: Any, checkpoint: Any) -> None:
    plain = checkpoint("eagle-tiny", **PLAIN)
    config = {"method": "draft_model", "model": plain, "num_speculative_tokens": 2}
    assert resolve(config).method == "draft_model"
    assert resolve({"model": plain, "num_speculative_tokens": 2}).method == "draft_model"


def test_B19_contradiction_names_both(fault: Any, checkpoint: Any) -> None:
    head = checkpoint("plain", architectures=["EagleLlamaForCausalLM"], model_type="eagle")
    text = fault({"method": "draft_model", "model": head, "num_speculative_tokens": 2})
    assert 'You asked for speculative_config.method="draft_model"' in text
    assert "declares an EAGLE head" in text
    assert 'Set method="eagle" or point model to a causal LM' in text
    assert "The folder name was not considered" in text


def test_plain_llama_config_may_be_an_eagle_head(resolve: Any, checkpoint: Any) -> None:
    """EAGLE-1 heads are published with their target's plain configuration."""
    assert resolve({"method": "eagle", "model": checkpoint(**PLAIN), "num_speculative_tokens": 2}).method == "eagle"


@pytest.mark.parametrize(
    ("method", "wanted"),
    [
        ("eagle", "an EAGLE head"),
        ("eagle3", "an EAGLE-3 head"),
        ("mlp_speculator", "an MLP speculator"),
        ("medusa", "Medusa heads"),
    ],
)
def test_a_causal_lm_is_no_head(fault: Any, heads: Any, tmp_path: Path, method: str, wanted: str) -> None:
    tiny_llama().save_pretrained(tmp_path / "draft")
    text = fault({"method": method, "model": str(tmp_path / "draft"), "num_speculative_tokens": 2}, heads)
    assert (
        f'needs {wanted} for this target, and "{tmp_path}/draft" is a causal LM of its own (LlamaForCausalLM)' in text
    )
    assert 'Write "method": "draft_model" to draft with it' in text


@pytest.mark.parametrize("config", [{}, {"num_speculative_tokens": 3}])
def test_neither_method_nor_model(faults: Any, config: dict[str, Any]) -> None:
    assert "names neither method nor model" in faults(config)[0]


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "dflash"])
@pytest.mark.parametrize("keys", [{}, {"num_speculative_tokens": 2}], ids=["without K", "with K"])
def test_method_needs_its_model(fault: Any, heads: Any, method: str, keys: dict[str, Any]) -> None:
    assert f'method "{method}" needs model' in fault({"method": method, **keys}, heads)


@pytest.mark.parametrize("keys", [{}, {"num_speculative_tokens": 2}], ids=["without K", "with K"])
@pytest.mark.parametrize("method", [None, "draft_model", "eagle", "eagle3", "medusa", "mlp_speculator"])
@pytest.mark.parametrize("folder", ["/no/such/folder", "./nowhere", "~/no_such_folder", "not/a/hub/id"])
def test_a_folder_that_does_not_exist(
    fault: Any, heads: Any, method: str | None, keys: dict[str, Any], folder: str
) -> None:
    config = {"model": folder, **keys} | ({"method": method} if method else {})
    text = fault(config, heads)
    assert text.startswith(f'speculative_config.model="{folder}": folder {folder} does not exist; give the folder of a')


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "medusa", "mlp_speculator"])
def test_a_hub_id_may_be_in_the_local_cache(resolve: Any, heads: Any, method: str) -> None:
    config = {"method": method, "model": "org/name", "num_speculative_tokens": 2}
    assert resolve(config, heads).speculative.model == "org/name"


def test_a_file_is_no_checkpoint(fault: Any, heads: Any, tmp_path: Any) -> None:
    file = tmp_path / "heads.gguf"
    file.touch()
    assert "is a file; give the folder" in fault({"method": "medusa", "model": str(file)}, heads)


@pytest.mark.parametrize("method", ["eagle3", "draft_model", "medusa"])
def test_an_empty_folder_is_one_fault(fault: Any, heads: Any, tmp_path: Any, method: str) -> None:
    assert "has no config.json" in fault({"method": method, "model": str(tmp_path)}, heads)


def test_heads_of_another_method_are_one_fault(fault: Any, heads: Any, without: Any, checkpoint: Any) -> None:
    config = {"method": "eagle3", "model": checkpoint(model_type="medusa", medusa_num_heads=3)}
    text = fault(config, heads)
    assert 'declares Medusa heads. Set method="medusa" or point model to a checkpoint for "eagle3"' in text
    config = {"method": "eagle3", "model": checkpoint("mtp", model_type="deepseek_mtp")}
    assert 'specplug has no method "mtp" yet: point model to a checkpoint for "eagle3".' in fault(
        config, without("mtp")
    )
    assert 'Set method="mtp"' in fault(config)


def test_mtp_takes_the_targets_checkpoint(resolve: Any, checkpoint: Any) -> None:
    target = checkpoint("target", **PLAIN, num_nextn_predict_layers=2)
    resolved = resolve({"method": "mtp"}, engine=resolve_engine_args(target, {})[0])
    assert resolved.speculative.model == target
    assert resolved.origins["model"] == "inferred: the target's own checkpoint"
    assert resolved.num_speculative_tokens == 2


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (None, "no model path is given"),
        ("proposer", '"proposer" is no dotted package.Class path'),
        ("pkg:Class", 'Write "pkg.Class".'),
        ("org/name", '"org/name" is a model id or a folder, not a class'),
        ("pkg..Class", "is no dotted package.Class path"),
    ],
)
def test_B150_class_path(fault: Any, model: str | None, expected: str) -> None:
    text = fault({"method": "custom_class", "model": model, "num_speculative_tokens": 2})
    assert 'method="custom_class" needs model="package.module.Class" (importable in *every* worker)' in text
    assert expected in text


def test_custom_class_needs_a_draft_length(fault: Any) -> None:
    assert "num_speculative_tokens missing" in fault({"method": "custom_class", "model": "pkg.Class"})


@pytest.mark.parametrize(
    ("config", "file"), [(None, "has no config.json"), ("{", "cannot be read"), ("[]", "no mapping")]
)
def test_unreadable_checkpoint(fault: Any, tmp_path: Any, config: str | None, file: str) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert file in fault({"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 2})


@pytest.mark.parametrize(
    ("method", "package"),
    [
        ("suffix", "specplug-suffix"),
        ("eagle", "specplug-eagle"),
        ("eagle3", "specplug-eagle"),
        ("mlp_speculator", "specplug-mlp"),
        ("medusa", "specplug-medusa"),
        ("extract_hidden_states", "specplug-hidden-states"),
    ],
)
def test_known_method_without_its_package(faults: Any, without: Any, method: str, package: str) -> None:
    found = faults({"method": method, "num_speculative_tokens": 1, f"{method}_own_key": 1}, without(method))
    expected = f'method "{method}" is served by the plugin package {package}, which is not installed; '
    assert any(text.startswith(f"{expected}pip install ./plugins/{package} in a checkout") for text in found)
    assert not any("own_key" in text for text in found)


@pytest.mark.parametrize("method", ["mtp", "dflash", "dspark", "deepseek_mtp"])
def test_a_method_without_a_package_names_nothing_to_install(
    fault: Any, without: Any, resolve: Any, checkpoint: Any, method: str
) -> None:
    """A package of that name on a registry would be a stranger's."""
    config = {"method": method, "model": checkpoint(**PLAIN), "num_speculative_tokens": 1}
    name = "mtp" if method == "deepseek_mtp" else method
    text = fault(config, without(name))
    assert text.startswith(f'specplug has no method "{name}" yet, and no plugin that is installed serves it.')
    assert "pip install" not in text
    assert fault({"method": method}, without(name)) == text
    assert resolve(config).plugins[0].name == name  # where a third party's plugin serves it


def test_every_package_that_a_message_names_is_in_the_repository() -> None:
    packages = {known.package for known in KNOWN_METHODS.values()} - {None, "specplug"}
    assert packages
    assert all((PLUGINS / str(package) / "pyproject.toml").is_file() for package in packages)


def test_core_method_that_this_build_lacks(fault: Any, without: Any, checkpoint: Any) -> None:
    config = {"method": "draft_model", "model": checkpoint(**PLAIN), "num_speculative_tokens": 1}
    assert "pip install . in a checkout of specplug" in fault(config, without("draft_model"))


def test_parallel_draft_model_is_served_by_pard(resolve: Any, fault: Any, without: Any, checkpoint: Any) -> None:
    config = {
        "method": "draft_model",
        "model": checkpoint(**PLAIN),
        "num_speculative_tokens": 2,
        "parallel_drafting": True,
    }
    resolved = resolve(config)
    assert resolved.method == "draft_model"
    assert resolved.plugins[0].name == "pard"
    assert "pip install ./plugins/specplug-pard in" in fault(config, without("pard"))


def test_block_drafters_always_draft_in_parallel(resolve: Any, checkpoint: Any) -> None:
    resolved = resolve({"method": "dflash", "model": checkpoint(block_size=4, dflash_config={})})
    assert resolved.speculative.parallel_drafting is True
    assert resolved.origins["parallel_drafting"].startswith("inferred")
    resolved = resolve({"model": checkpoint("p", speculators_model_type="peagle"), "num_speculative_tokens": 2})
    assert resolved.speculative.parallel_drafting is True
    assert resolved.plugins[0].name == "eagle3"


def test_B155_unknown_method(fault: Any) -> None:
    text = fault({"method": "ngarm", "num_speculative_tokens": 3})
    assert text.startswith('No proposer plugin "ngarm". Installed: ngram, ')
    assert text.endswith("Did you mean ngram?")


def test_of_a_misspelt_method_only_the_name_is_a_fault(fault: Any, checkpoint: Any) -> None:
    text = fault({"method": "eagle_3", "model": checkpoint(**PLAIN), "num_speculative_tokens": 3})
    assert text.endswith("Did you mean eagle3?")


def test_an_unknown_method_is_answered_with_the_proposers_there_are(fault: Any, without: Any, load_error: Any) -> None:
    text = fault({"method": "", "num_speculative_tokens": 3}, without(broken={"suffix": load_error}))
    assert text.startswith('No proposer plugin "". Installed: ngram, custom_class, draft_model, ')
    assert "acceptance" not in text
    assert "suffix" not in text


class SwitchedOff(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        raise PluginNotFoundError(f'plugin "{name}" is installed but switched off: SPECPLUG_X', is_switched_off=True)


@pytest.mark.parametrize(
    "config",
    [
        {"method": "ngram", "num_speculative_tokens": 3},
        {"method": "mine", "num_speculative_tokens": 3},
    ],
)
def test_a_method_that_is_switched_off_is_not_called_missing(fault: Any, config: dict[str, Any]) -> None:
    text = fault(config, SwitchedOff())
    assert text == f'plugin "{config["method"]}" is installed but switched off: SPECPLUG_X.'


def test_a_verifier_that_is_switched_off_is_not_called_missing(resolve: Any, methods: Any) -> None:
    installed = SwitchedOff({"ngram": methods["ngram"]})
    config = {"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": "typical"}
    with pytest.raises(ConfigError, match='"typical" is installed but switched off'):
        resolve(config, installed)


def test_a_process_manager_says_what_it_switches_off(resolve: Any) -> None:
    manager = ProcessManager(block=["ngram"])
    with pytest.raises(ConfigError, match="switched off: it is in the block list"):
        resolve({"method": "ngram", "num_speculative_tokens": 3}, manager.methods)


@pytest.mark.parametrize("k", [2**15 + 1, 10**9, 10**5000], ids=["limit", "billion", "unprintable"])
def test_k_has_a_limit(fault: Any, k: int) -> None:
    text = fault({"method": "ngram", "num_speculative_tokens": k})
    assert "must be at most 32768" in text
    assert len(text) < 400


def test_k_is_below_max_model_len(fault: Any, resolve: Any) -> None:
    engine = resolve_engine_args("target", {"max_model_len": 8})[0]
    assert "=8 must be below max_model_len=8" in fault({"method": "ngram", "num_speculative_tokens": 8}, engine=engine)
    assert resolve({"method": "ngram", "num_speculative_tokens": 7}, engine=engine).num_speculative_tokens == 7


@pytest.mark.parametrize("keys", [{}, {"num_speculative_tokens": 2}], ids=["without K", "with K"])
def test_what_is_no_method_is_answered_with_its_place(fault: Any, keys: dict[str, Any]) -> None:
    text = fault({"method": "typical", **keys})
    assert "is a plugin of kind verifier, not a proposer" in text
    assert 'write "rejection_sample_method": "typical" and pass allow_lossy=True (on the command line --allow' in text
    assert "allow_lossy" not in fault({"method": "exact", **keys})
    text = fault({"method": "tli", **keys})
    assert text.endswith('write "method": "draft_model", "use_heterogeneous_vocab": true.')
    assert fault({"method": "dynamic", **keys}).endswith("beside a method write num_speculative_tokens_per_batch_size.")


def test_method_of_another_kind(fault: Any) -> None:
    text = fault({"method": "mine", "num_speculative_tokens": 3})
    assert "is a plugin of kind policy, not a proposer" in text
    assert "name it in plugins=" in text


def test_third_party_method_with_a_model(resolve: Any, checkpoint: Any) -> None:
    folder = checkpoint(**PLAIN)
    (Path(folder) / "tokenizer.json").touch()
    config = {"method": "other", "model": folder, "num_speculative_tokens": 2, "max_model_len": 64}
    assert resolve(config | {"use_heterogeneous_vocab": True}).method == "other"
