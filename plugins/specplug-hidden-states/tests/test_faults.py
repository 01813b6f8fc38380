"""Aborts, broken-off runs, slow and full disks, settings that cannot be."""

from __future__ import annotations

import errno
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from specplug_hidden_states import complete_files
from specplug_hidden_states.files import GrowingFile
from specplug_hidden_states.writer import Rows, Writer

from specplug import LLM, ConfigError, PluginFaultError, SamplingParams
from specplug.testing import ScriptedTarget, tiny_llama

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [token, 6, 7]} for token in (5, 8, 9)]
FILE_BYTES = 1656
"""Of one of these requests: 8 tokens, one layer of 32 float32, and the header."""


def open_llm(folder: Path, *, strict: bool = True, **more: Any) -> LLM:
    config = {
        "method": "extract_hidden_states",
        "extract_hidden_states_path": str(folder),
        "extract_hidden_states_layers": [1],
        **more,
    }
    return LLM(tiny_llama(), speculative_config=config, strict=strict)


def report(llm: LLM) -> Any:
    return llm._session.hooks.instance("extract_hidden_states").report


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_abort_leaves_no_file(tmp_path: Path) -> None:
    with open_llm(tmp_path) as llm:
        for request_id in ("keep", "gone"):
            llm.add_request(request_id, PROMPTS[0], PARAMS)
        llm.step()
        llm.abort("gone")
        while llm.has_unfinished_requests():
            llm.step()
    assert files(tmp_path) == ["hs_keep.safetensors"]
    assert report(llm).lost == {"gone": "the request ended with 'abort'"}


def test_closing_early_leaves_no_half_file(tmp_path: Path) -> None:
    llm = open_llm(tmp_path)
    llm.add_request("half", PROMPTS[0], PARAMS)
    llm.step()
    llm.close()
    assert files(tmp_path) == []
    assert list(report(llm).lost) == ["half"]


def test_ids_may_come_again(tmp_path: Path) -> None:
    with open_llm(tmp_path) as llm:
        llm.add_request("a", PROMPTS[0], PARAMS)
        llm.step()
        llm.abort("a")
        llm.step()
        llm.add_request("a", PROMPTS[1], PARAMS)
        while llm.has_unfinished_requests():
            llm.step()
    assert load_file(tmp_path / "hs_a.safetensors")["token_ids"].tolist()[:3] == [8, 6, 7]


def test_a_second_run_goes_on(tmp_path: Path) -> None:
    with open_llm(tmp_path) as llm:
        llm.generate(PROMPTS[:2], PARAMS)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert (tmp_path / "hs_0.safetensors").stat().st_size == FILE_BYTES
    (tmp_path / "hs_2.safetensors.part").write_bytes(b"broken off")
    assert list(complete_files(tmp_path)) == ["0", "1"]
    with open_llm(tmp_path) as llm:
        llm.generate(PROMPTS, PARAMS)
    assert (report(llm).num_present, report(llm).num_written, report(llm).lost) == (2, 1, {})
    assert files(tmp_path) == ["hs_0.safetensors", "hs_1.safetensors", "hs_2.safetensors"]
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in before} == before


def test_files_of_something_else_are_neither_kept_as_ours_nor_overwritten(tmp_path: Path) -> None:
    with open_llm(tmp_path) as llm:
        llm.generate(PROMPTS[:1], PARAMS)
    (tmp_path / "hs_1.safetensors").write_bytes(b"no safetensors at all")
    before = (tmp_path / "hs_0.safetensors").read_bytes()
    with open_llm(tmp_path) as llm:
        llm.generate(PROMPTS[1:], PARAMS)
    assert "holds another prompt" in report(llm).lost["0"]
    assert "cannot be read" in report(llm).lost["1"]
    assert (tmp_path / "hs_0.safetensors").read_bytes() == before
    with open_llm(tmp_path, extract_hidden_states_layers=[0]) as llm:
        llm.generate(PROMPTS[:1], PARAMS)
    assert "with layers [1], not [0]" in report(llm).lost["0"]


def plain_text() -> list[list[int]]:
    with LLM(tiny_llama()) as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, PARAMS)]


def test_the_bound_of_the_folder_stops_extraction_and_not_decoding(tmp_path: Path, caplog: Any) -> None:
    with open_llm(tmp_path, strict=False, extract_hidden_states_max_bytes=FILE_BYTES + 1000) as llm:
        found = report(llm)
        texts = []
        for prompt in PROMPTS:
            (output,) = llm.generate([prompt], PARAMS)
            texts.append(list(output.outputs[0].token_ids))
        faults = dict(llm._session.hooks.faults)
    assert texts == plain_text()
    assert files(tmp_path) == ["hs_0.safetensors"]
    assert "extract_hidden_states_max_bytes" in found.stopped
    assert sum(faults.values()) == 1
    assert "no longer written" in caplog.text


def test_the_bound_counts_files_of_earlier_runs(tmp_path: Path) -> None:
    with open_llm(tmp_path) as llm:
        llm.generate(PROMPTS[:1], PARAMS)
    with open_llm(tmp_path, strict=False, extract_hidden_states_max_bytes=FILE_BYTES + 1000) as llm:
        llm.add_request("other", PROMPTS[1], PARAMS)
        while llm.has_unfinished_requests():
            llm.step()
    assert files(tmp_path) == ["hs_0.safetensors"]


def test_the_bound_forgets_files_that_were_given_up(tmp_path: Path) -> None:
    with open_llm(tmp_path, extract_hidden_states_max_bytes=FILE_BYTES + 1000) as llm:
        llm.add_request("gone", PROMPTS[0], PARAMS)
        for _ in range(4):
            llm.step()
        llm.abort("gone")
        llm.add_request("kept", PROMPTS[1], PARAMS)
        while llm.has_unfinished_requests():
            llm.step()
    assert files(tmp_path) == ["hs_kept.safetensors"]


def test_the_queue_takes_as_much_as_it_is_said_to(tmp_path: Path) -> None:
    rows = Rows(torch.zeros(10, 1, 1), None, (("a", [1] * 10),))
    assert rows.num_bytes == 40
    for queue_bytes, num_taken in ((39, 1), (79, 1), (80, 2), (119, 2), (120, 3)):
        writer = Writer(tmp_path, [1], queue_bytes=queue_bytes, max_bytes=None)  # not started: nothing is taken out
        assert [writer.put_rows(rows, wait=False) for _ in range(4)] == [True] * num_taken + [False] * (4 - num_taken)


def test_a_full_disk_is_an_error_when_strict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(self: Any, states: Any, token_ids: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(GrowingFile, "append", no_space)
    llm = open_llm(tmp_path)
    with pytest.raises(PluginFaultError, match="No space left on device"):
        for _ in range(200):
            llm.generate(PROMPTS, PARAMS)
    llm.close()
    assert files(tmp_path) == []


def test_a_file_that_cannot_be_made_costs_that_request_only(tmp_path: Path) -> None:
    with open_llm(tmp_path) as llm:
        for request_id in ("x" * 300, "fine"):
            llm.add_request(request_id, PROMPTS[0], PARAMS)
        while llm.has_unfinished_requests():
            llm.step()
    assert files(tmp_path) == ["hs_fine.safetensors"]
    assert "cannot be made" in report(llm).lost["x" * 300]


def run(llm: LLM, requests: dict[str, tuple[dict[str, Any], SamplingParams]]) -> None:
    """All of them at once, by their ids."""
    for request_id, (prompt, params) in requests.items():
        llm.add_request(request_id, prompt, params)
    while llm.has_unfinished_requests():
        llm.step()


def asking(max_tokens: int = 6, **settings: Any) -> SamplingParams:
    extra_args = {"kv_transfer_params": settings}
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra_args)


def read_back(path: Path) -> list[int]:
    token_ids: list[int] = load_file(path)["token_ids"].tolist()
    return token_ids


@pytest.mark.parametrize("num_tokens", [(10, 4), (4, 10), (6, 6)])
def test_a_name_that_is_being_written_to_is_the_first_requests(
    tmp_path: Path, num_tokens: tuple[int, int], caplog: Any
) -> None:
    first, second = (asking(count, hidden_states_path="x.safetensors") for count in num_tokens)
    with open_llm(tmp_path) as llm:
        run(llm, {"a": (PROMPTS[0], first), "b": (PROMPTS[1], second), "c": (PROMPTS[2], PARAMS)})
        run(llm, {"d": (PROMPTS[2], PARAMS)})
    assert files(tmp_path) == ["hs_c.safetensors", "hs_d.safetensors", "x.safetensors"]
    found = read_back(tmp_path / "x.safetensors")
    assert (found[:3], len(found)) == ([5, 6, 7], 3 + num_tokens[0] - 1)
    assert list(report(llm).lost) == ["b"]
    assert "another request is being written to x.safetensors" in report(llm).lost["b"]
    assert caplog.text.count("no hidden states of request") == 1
    assert "1 requests have none" in caplog.text


def test_a_name_may_not_be_anothers_default_while_that_is_written(tmp_path: Path) -> None:
    with open_llm(tmp_path) as llm:
        run(llm, {"a": (PROMPTS[0], PARAMS), "b": (PROMPTS[1], asking(hidden_states_path="hs_a.safetensors"))})
    assert read_back(tmp_path / "hs_a.safetensors")[:3] == [5, 6, 7]
    assert (list(report(llm).lost), report(llm).stopped) == (["b"], None)


def test_a_name_is_free_again_after_its_request_was_lost(tmp_path: Path) -> None:
    named = asking(hidden_states_path="x.safetensors")
    with open_llm(tmp_path) as llm:
        llm.add_request("a", PROMPTS[0], named)
        llm.step()
        llm.abort("a")
        llm.step()
        run(llm, {"b": (PROMPTS[1], named)})
    assert read_back(tmp_path / "x.safetensors")[:3] == [8, 6, 7]


ODD_REQUESTS = [
    ("odd", asking(hidden_states_path="x\0.safetensors"), "null byte"),
    ("odd", asking(hidden_states_path="\ud800.safetensors"), "surrogates not allowed"),
    ("\ud800", PARAMS, "give it a hidden_states_path"),
    ("odd", asking(include_output_tokens="false"), "include_output_tokens='false' must be true or false, not a str"),
    ("odd", asking(include_output_tokens=0), "include_output_tokens=0 must be true or false, not a int"),
]


@pytest.mark.parametrize(("request_id", "params", "reason"), ODD_REQUESTS)
def test_an_odd_request_loses_its_own_file_only(
    tmp_path: Path, request_id: str, params: SamplingParams, reason: str, caplog: Any
) -> None:
    with open_llm(tmp_path) as llm:
        run(llm, {request_id: (PROMPTS[0], params), "fine": (PROMPTS[1], PARAMS)})
        run(llm, {"later": (PROMPTS[1], PARAMS)})
    assert files(tmp_path) == ["hs_fine.safetensors", "hs_later.safetensors"]
    assert list(report(llm).lost) == [request_id]
    assert reason in report(llm).lost[request_id]
    assert caplog.text.count("no hidden states of request") == 1
    assert "1 requests have none" in caplog.text


def test_a_file_with_odd_token_ids_costs_that_request_only(tmp_path: Path) -> None:
    save_file({"token_ids": torch.tensor(5)}, tmp_path / "hs_odd.safetensors", metadata={"layers": "[1]"})
    with open_llm(tmp_path) as llm:
        run(llm, {"odd": (PROMPTS[0], PARAMS), "fine": (PROMPTS[1], PARAMS)})
    assert (list(report(llm).lost), report(llm).stopped, report(llm).num_written) == (["odd"], None, 1)


def test_a_setting_of_none_is_none_given(tmp_path: Path) -> None:
    with open_llm(tmp_path, extract_hidden_states_output=False) as llm:
        run(llm, {"a": (PROMPTS[0], asking(include_output_tokens=None))})
    assert read_back(tmp_path / "hs_a.safetensors") == [5, 6, 7]


def test_a_file_that_cannot_get_its_name_costs_that_request_only(tmp_path: Path) -> None:
    with open_llm(tmp_path) as llm:
        for request_id, prompt in zip("ab", PROMPTS, strict=False):
            llm.add_request(request_id, prompt, PARAMS)
        llm.step()
        wait_for(tmp_path / "hs_a.safetensors.part")
        (tmp_path / "hs_a.safetensors").mkdir()
        run(llm, {"c": (PROMPTS[2], PARAMS)})
    assert files(tmp_path) == ["hs_a.safetensors", "hs_b.safetensors", "hs_c.safetensors"]
    assert "cannot get its name" in report(llm).lost["a"]
    assert (list(report(llm).lost), report(llm).stopped, report(llm).num_written) == (["a"], None, 2)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def test_a_folder_that_goes_stops_extraction(tmp_path: Path) -> None:
    folder = tmp_path / "inner"
    llm = open_llm(folder, strict=False)
    found = report(llm)
    llm.add_request("a", PROMPTS[0], PARAMS)
    llm.step()
    wait_for(folder / "hs_a.safetensors.part")
    shutil.rmtree(folder)
    run(llm, {})
    llm.close()
    assert "No such file" in found.stopped
    assert list(found.lost) == ["a"]


class FailingDisk:
    """Fails when files are completed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def no_space(file: GrowingFile) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(GrowingFile, "complete", no_space)


def test_a_disk_that_fails_after_the_last_step_is_told_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    FailingDisk(monkeypatch)
    with open_llm(tmp_path, strict=False) as llm:
        found = report(llm)
        outputs = llm.generate(PROMPTS, PARAMS)
    assert [list(output.outputs[0].token_ids) for output in outputs] == plain_text()
    assert (files(tmp_path), list(found.lost)) == ([], ["0", "1", "2"])
    assert llm._session.hooks.faults == {"finish_session_raised:extract_hidden_states": 1}
    assert "3 requests have none; stopped: [Errno 28]" in caplog.text
    assert caplog.text.count("hidden states are no longer written: [Errno 28]") >= 1


def test_a_disk_that_fails_after_the_last_step_is_an_error_when_strict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FailingDisk(monkeypatch)
    llm = open_llm(tmp_path)
    llm.generate(PROMPTS, PARAMS)
    with pytest.raises(PluginFaultError, match=r"finish_session.*No space left on device"):
        llm.close()


def test_requests_after_the_stop_are_counted_and_the_fault_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    FailingDisk(monkeypatch)
    with open_llm(tmp_path, strict=False) as llm:
        for _ in range(200):
            llm.generate(PROMPTS[:1], PARAMS)
            if llm._session.hooks.faults:
                break
        llm.generate(PROMPTS, PARAMS)
        num_requests = llm._session._num_requests
    assert llm._session.hooks.faults == {"advance_raised:extract_hidden_states": 1}
    assert f"{num_requests} requests have none; stopped" in caplog.text


def test_an_id_that_got_its_file_in_the_end_is_not_lost(tmp_path: Path, caplog: Any) -> None:
    with open_llm(tmp_path) as llm:
        run(llm, {"a": (PROMPTS[0], asking(include_output_tokens="no"))})
        run(llm, {"a": (PROMPTS[0], PARAMS)})
    assert (files(tmp_path), report(llm).lost) == (["hs_a.safetensors"], {})
    assert "1 requests have none" in caplog.text


class SlowDisk:
    """Holds every write back until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.released = threading.Event()
        append = GrowingFile.append

        def slow(file: GrowingFile, states: Any, token_ids: Any) -> None:
            self.released.wait(30)
            append(file, states, token_ids)

        monkeypatch.setattr(GrowingFile, "append", slow)


def test_a_slow_disk_slows_decoding_down_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SlowDisk(monkeypatch)
    llm = open_llm(tmp_path, extract_hidden_states_queue_bytes=1)
    llm.add_request("a", PROMPTS[0], PARAMS)
    llm.step()
    stepping = threading.Thread(target=llm.step)
    stepping.start()
    stepping.join(0.3)
    assert stepping.is_alive(), "the second step's states do not fit behind the first's"
    disk.released.set()
    stepping.join(30)
    while llm.has_unfinished_requests():
        llm.step()
    llm.close()
    assert len(load_file(tmp_path / "hs_a.safetensors")["token_ids"]) == 3 + 5


def test_a_slow_disk_may_cost_requests_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SlowDisk(monkeypatch)
    more = {"extract_hidden_states_queue_bytes": 1, "extract_hidden_states_when_full": "drop"}
    with open_llm(tmp_path, **more) as llm:
        llm.generate(PROMPTS, PARAMS)
        disk.released.set()
    assert files(tmp_path) == []
    assert report(llm).lost == dict.fromkeys(["0", "1", "2"], "the queue for the disk was full")


def test_settings_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the target has 2 decoder layers, so name layers 0 to 2"):
        open_llm(tmp_path, extract_hidden_states_layers=[3])
    with pytest.raises(ConfigError, match="must name layers from 0 on, each once"):
        open_llm(tmp_path, extract_hidden_states_layers=[1, 1])
    with pytest.raises(ConfigError, match="Write extract_hidden_states_layers"):
        open_llm(tmp_path, extract_hidden_states_layers=None)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file; name a folder"):
        open_llm(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"cannot be used: .*Not a directory"):
        open_llm(tmp_path / "file" / "inside", strict=False)
    with pytest.raises(ConfigError, match="extract_hidden_states_path"):
        LLM(ScriptedTarget([1]), speculative_config={"method": "extract_hidden_states"})


def test_default_layers_are_those_that_speculators_trains_with(tmp_path: Path) -> None:
    model = tiny_llama(num_hidden_layers=8)
    config = {"method": "extract_hidden_states", "extract_hidden_states_path": str(tmp_path)}
    with LLM(model, speculative_config=config, strict=True) as llm:
        assert llm._session.hooks.instance("extract_hidden_states").hidden_state_layers == (2, 4, 5, 8)
