"""``specplug doctor``: vocabularies, special tokens, cost and advice for a pair of models."""

from __future__ import annotations

import json
import string
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from specplug.cli import app
from specplug.testing import tiny_llama, toy_tokenizer
from specplug.tli.cost import ModelSize, best_draft_length, estimate_cost, speed_up

runner = CliRunner()
LETTERS = [*string.ascii_lowercase, " ", "é", "\n", "end"]


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., str]:
    def run(name: str, tokenizer: Any, **settings: Any) -> str:
        sizes = {"vocab_size": len(tokenizer), "eos_token_id": None} | settings
        tiny_llama(**sizes).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return run


def letters() -> Any:
    return toy_tokenizer(LETTERS, eos_token_id=len(LETTERS) - 1)


def marked() -> Any:
    """The same letters in SentencePiece's way, some in upper case only."""
    tokens = ["<eos>", "▁", *string.ascii_lowercase[:20], *string.ascii_uppercase, "<0x0A>", "é"]
    tokenizer = Tokenizer(
        models.BPE({token: number for number, token in enumerate(tokens)}, [], byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def examine(target: str, draft: str, *options: str) -> dict[str, Any]:
    result = runner.invoke(app, ["doctor", "--target", target, "--draft", draft, "--json", *options])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text("abz\né x", encoding="utf-8")
    return str(tmp_path / "text.txt")


def test_a_pair_with_other_vocabularies(save: Any, text: str) -> None:
    target, draft = save("target", letters()), save("draft", marked(), num_hidden_layers=1)
    found = examine(target, draft, "--text", text)
    assert found["vocabulary"] == "different"
    assert 'id 0, "a" in the target and "<eos>" in the draft' in found["difference"]
    pair = found["pair"]
    assert pair["num_by_bytes"] == 20 + 3  # letters; space, é and the newline
    assert pair["num_shared"] == 24
    assert pair["roles"] == {"eos": ["end", "<eos>"]}
    assert pair["shared_roles"] == ["eos"]
    # a, b, newline, é and the space can be drafted; z and x cannot
    assert pair["coverage"]["token_share"] == pytest.approx(5 / 7)
    assert pair["coverage"]["byte_share"] == pytest.approx(6 / 8)
    assert pair["strings"]["lost"] == ["\\n"]
    assert pair["strings"]["coverage"]["token_share"] == pytest.approx(4 / 7)
    assert found["speculative_config"] == {
        "method": "draft_model",
        "model": draft,
        "num_speculative_tokens": 3,
        "use_heterogeneous_vocab": True,
    }
    assert found["advice"][0].endswith("the draft needs use_heterogeneous_vocab.")
    assert found["cost"]["ceiling"] == pytest.approx(5 / 7)


def test_a_shared_vocabulary_needs_no_map(save: Any) -> None:
    found = examine(save("target", letters()), save("draft", letters(), vocab_size=40, num_hidden_layers=1))
    assert (found["vocabulary"], found["pair"], found["difference"]) == ("same", None, None)
    assert "without use_heterogeneous_vocab" in found["advice"][0]
    assert "use_heterogeneous_vocab" not in found["speculative_config"]


def test_equal_ids_and_more_of_them_need_no_map_either(save: Any) -> None:
    more = toy_tokenizer([*LETTERS, "extra"], eos_token_id=len(LETTERS) - 1)
    assert examine(save("target", letters()), save("draft", more))["vocabulary"] == "compatible"


def test_a_draft_as_costly_as_the_target_is_advised_against(save: Any, text: str) -> None:
    found = examine(save("target", letters()), save("draft", marked(), num_hidden_layers=6), "--text", text)
    assert "this draft cannot pay" in found["advice"][-1]
    target, draft = save("big", letters(), num_hidden_layers=20), save("small", marked(), num_hidden_layers=1)
    assert "With 3 draft tokens the most it can give is" in examine(target, draft, "--text", text)["advice"][-1]


def test_nothing_lost_by_strings_has_no_examples(save: Any) -> None:
    other = toy_tokenizer(LETTERS[::-1], eos_token_id=0)
    models = ["--target", save("target", letters()), "--draft", save("draft", other)]
    text = Path(save("text", letters())) / "text.txt"
    text.write_text("abc", encoding="utf-8")
    shown = runner.invoke(app, ["doctor", *models, "--text", str(text)]).stdout
    [line] = [line for line in shown.splitlines() if "lost by strings" in line]
    assert line.split()[-1] == "0"


def test_the_table_for_the_eye(save: Any, text: str) -> None:
    models = ["--target", save("target", letters()), "--draft", save("draft", marked())]
    result = runner.invoke(app, ["doctor", *models, "--text", text])
    assert result.exit_code == 0, result.output
    for part in (
        "by bytes (specplug)",
        "acceptance ceiling",
        "special tokens, by declared role",
        "speculative_config:",
    ):
        assert part in result.stdout


def test_a_text_that_cannot_be_read_is_named(save: Any) -> None:
    folder = save("target", letters())
    result = runner.invoke(app, ["doctor", "--target", folder, "--draft", folder, "--text", "absent.txt"])
    assert result.exit_code == 2
    assert "--text absent.txt cannot be read" in result.stderr


def test_an_absent_folder_is_told_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from specplug.cli import app\n"
        f"try:\n    app(['doctor', '--target', '{tmp_path}/absent', '--draft', 'x'])\n"
        "except SystemExit as end:\n    assert end.code == 2\n"
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "absent does not exist" in done.stderr


def test_a_text_that_the_target_cannot_write_is_an_error(save: Any) -> None:
    models = ["--target", save("target", letters()), "--draft", save("draft", marked())]
    result = runner.invoke(app, ["doctor", *models])
    assert result.exit_code == 2
    assert "the target's tokenizer cannot encode the text" in result.stderr


def test_nothing_in_common_is_an_error(save: Any) -> None:
    other = toy_tokenizer(["1", "2"], eos_token_id=None)
    result = runner.invoke(app, ["doctor", "--target", save("target", letters()), "--draft", save("draft", other)])
    assert result.exit_code == 2
    assert "no token of the draft's vocabulary" in result.stderr


def test_the_speed_up_formula() -> None:
    """Against the table of best draft lengths and gains of the literature's formula."""
    for cost, acceptance, length, gain in [(0.02, 0.5, 4, 1.79), (0.05, 0.8, 8, 3.09), (0.2, 0.9, 7, 2.37)]:
        assert best_draft_length(acceptance, cost) == length
        assert speed_up(acceptance, length, cost) == pytest.approx(gain, abs=0.005)
    assert best_draft_length(0.5, 0.6) == 0  # a draft that costs more than it is right


def test_weights_and_layers_bound_the_cost() -> None:
    target = ModelSize("t", "llama", 10, 20, 1000, 900)
    draft = ModelSize("d", "llama", 10, 30, 500, 450)
    report = estimate_cost(target, draft, 0.9)
    assert (report.least, report.most) == (0.5, 1.5)
    assert report.worst_draft_length == 0
    assert report.worst_speed_up == 1.0
    assert report.best_speed_up > 1.0
