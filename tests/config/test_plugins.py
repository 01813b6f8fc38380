"""plugins=, options, and what gets imported."""

from __future__ import annotations

from typing import Any

import pytest

from specplug.config import explain
from specplug.errors import ConfigError

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.mark.parametrize(
    "entry", [{"name": "mine", "mine_level": 2}, 'mine:{"mine_level": 2}', {"name": "mine", "mine-level": 2}]
)
def test_entry_forms(resolve: Any, entry: Any) -> None:
    resolved = resolve(NGRAM, plugins=[entry])
    assert [each.name for each in resolved.plugins] == ["ngram", "mine", "acceptance"]
    assert resolved.plugins[1].options.mine_level == 2
    assert resolved.plugins[1].num_speculative_tokens == 3
    assert resolved.plugins[1].settings["prompt_lookup_max"] == 3


def test_bare_name_has_default_options(resolve: Any) -> None:
    assert resolve(None, plugins=["mine"]).plugins[0].options.mine_level == 1
    assert resolve(None, plugins="mine").plugins[0].name == "mine"


def test_lists_serve_as_tuples(resolve: Any) -> None:
    assert resolve(None, plugins=[{"name": "mine", "mine_names": ["a"]}]).plugins[0].options.mine_names == ("a",)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (
            {"name": "mine", "mine_level": 4},
            "plugins[0] (mine).mine_level=4 is not valid: it must be a whole number from",
        ),
        ({"name": "mine", "mine_level": "2"}, "plugins[0] (mine).mine_level="),
        ({"name": "mine", "mine_levle": 2}, "Did you mean mine_level?"),
        ({"name": "typical", "x": 2}, "It has no options"),
        ({"mine_level": 2}, "names no plugin"),
        ({"name": 3}, "names no plugin"),
        ("", "names no plugin"),
        ("mine:{bad", "plugins[0] (mine) is not valid JSON"),
        (3, "names no plugin"),
        ("ngarm", 'No plugin "ngarm"'),
        ("ngram", "already active through method"),
        ({"name": "needy"}, "plugins[0] (needy).needy_path is required and missing"),
        ({"name": "needy", "needy_path": 3}, "needy_path=3 is not valid: it must be text"),
    ],
)
def test_bad_entries(fault: Any, entry: Any, expected: str) -> None:
    assert expected in fault(NGRAM, plugins=[entry], allow_lossy=True)


def test_a_plugins_own_rule_over_several_options(fault: Any) -> None:
    expected = 'options of plugin "pair": low exceeds high.'
    assert fault(None, plugins=[{"name": "pair", "low": 3, "high": 2}]) == expected
    assert fault(NGRAM | {"low": 3}, plugins=["pair"]) == expected
    assert fault(NGRAM | {"low": "3"}, plugins=["pair"]).startswith("speculative_config.low=")


def test_option_given_in_both_places(fault: Any) -> None:
    text = fault(NGRAM | {"low": 1}, plugins=[{"name": "pair", "low": 2}])
    assert text == "speculative_config.low is given again in plugins= for pair; keep one."


def test_options_that_json_cannot_hold(resolve: Any, fault: Any) -> None:
    marker = object()
    assert (
        resolve(None, plugins=[{"name": "needy", "needy_path": "x", "needy_any": marker}]).plugins[0].options.needy_any
        is marker
    )
    assert "needy_path" in fault(None, plugins=[{"name": "needy", "needy_path": marker}])


def test_same_plugin_twice(fault: Any) -> None:
    assert "already active through plugins=" in fault(NGRAM, plugins=["mine", "mine"])


def test_proposer_without_speculation(fault: Any) -> None:
    assert 'write speculative_config={"method": "other"' in fault(None, plugins=["other"])


def test_second_proposer_is_asked_after_the_first(resolve: Any) -> None:
    assert [each.name for each in resolve(NGRAM, plugins=["other"]).plugins] == ["ngram", "other", "acceptance"]


def test_plugin_key_inside_speculative_config(resolve: Any, fault: Any) -> None:
    resolved = resolve(NGRAM | {"ngram_backoff": False})
    assert resolved.plugins[0].options.ngram_backoff is False
    assert resolved.origins["ngram_backoff"] == "given"
    assert resolved.plugins[0].settings["ngram_backoff"] is False
    assert resolve(NGRAM | {"mine_level": 3}, plugins=["mine"]).plugins[1].options.mine_level == 3
    assert fault(NGRAM | {"ngram_backoff": "no"}).startswith("speculative_config.ngram_backoff=")


def test_observer_is_on_by_default_and_may_be_absent(resolve: Any, without: Any) -> None:
    assert resolve(NGRAM).origins["plugins.acceptance"] == "default"
    assert [each.name for each in resolve(NGRAM, without("acceptance")).plugins] == ["ngram"]
    listed = resolve(NGRAM, plugins=["acceptance"])
    assert [each.name for each in listed.plugins] == ["ngram", "acceptance"]
    assert listed.origins["plugins.acceptance"] == "plugins="


def test_broken_observer_is_a_note(resolve: Any, without: Any, load_error: Any) -> None:
    resolved = resolve(NGRAM, without(broken={"acceptance": load_error}))
    assert [each.name for each in resolved.plugins] == ["ngram"]
    assert any("acceptance metrics are off" in note for note in resolved.notes)


def test_B155_broken_plugin(resolve: Any, without: Any, load_error: Any) -> None:
    config = {"method": "suffix", "num_speculative_tokens": 3, "top_p": 1}
    with pytest.raises(ConfigError) as caught:
        resolve(config, without(broken={"suffix": load_error}))
    assert len(caught.value.faults) == 2
    assert "specplug-suffix 1.2" in str(caught.value)
    assert "No module named 'numba'" in str(caught.value)
    assert caught.value.__cause__ is load_error


def test_only_what_is_asked_for_is_imported(resolve: Any, methods: Any) -> None:
    resolve(NGRAM)
    assert set(methods.imported) == {"ngram", "acceptance"}


def test_settings_are_read_only(resolve: Any) -> None:
    with pytest.raises(TypeError):
        resolve(NGRAM).plugins[0].settings["method"] = "x"


def test_lossy_plugin_needs_permission(fault: Any, resolve: Any) -> None:
    assert "allow_lossy=True" in fault(NGRAM, plugins=["typical"])
    assert resolve(NGRAM, plugins=["typical"], allow_lossy=True).verify_method == "auto"


def test_explain(resolve: Any, methods: Any, engine: Any) -> None:
    import json

    resolved = resolve(NGRAM | {"ngram_backoff": False, "enforce_eager": True}, plugins=["mine"])
    shown = explain(resolved, engine, ("engine note",), methods, distributions={"mine": "mine-dist 1.0"})
    assert (shown.method, shown.served_by, shown.num_speculative_tokens) == ("ngram", "ngram", 3)
    settings = {row.key: row for row in shown.settings}
    assert settings["prompt_lookup_max"].origin == "given"
    assert settings["enforce_eager"].term == "accepted"
    assert settings["rejection_sample_method"].origin == "default"
    assert "suffix_decoding_max_tree_depth" not in settings
    plugins = {row.name: row for row in shown.plugins}
    assert plugins["mine"].distribution == "mine-dist 1.0"
    assert plugins["mine"].role == "plugins="
    assert [(row.key, row.value, row.origin) for row in plugins["ngram"].options] == [("ngram_backoff", False, "given")]
    assert shown.notes[0] == "engine note"
    engine_rows = {row.key: row for row in shown.engine}
    assert (engine_rows["model"].value, engine_rows["model"].origin) == ("target", "given")
    assert engine_rows["max_num_seqs"].origin == "default"
    assert json.loads(json.dumps(shown.to_dict()))["method"] == "ngram"


def test_explain_without_speculation(resolve: Any, methods: Any, engine: Any) -> None:
    shown = explain(resolve(None), engine, (), methods)
    assert shown.method is None
    assert shown.settings == ()
    assert [row.name for row in shown.plugins] == ["acceptance"]
