"""vLLM itself behind the door. ``SPECPLUG_VLLM_PYTHON`` names the interpreter that has it, and specplug, installed.

``SPECPLUG_VLLM_SOURCES`` may name more unpacked releases (folders of ``vllm``, separated as in ``PATH``) for the check
of the names that the door uses.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from specplug.adapters.vllm_symbols import TESTED_RELEASES, mismatches
from specplug.demo.models import SMOLLM2, smollm2_path

HERE = Path(__file__).parent
PYTHON = os.environ.get("SPECPLUG_VLLM_PYTHON", "")
needs_vllm = pytest.mark.skipif(not PYTHON, reason="SPECPLUG_VLLM_PYTHON names no interpreter with vLLM")

NGRAM = "specplug.adapters.vllm.NgramProposer"
SUFFIX = "specplug_suffix.vllm.SuffixProposer"
DRAFT_MODEL = "specplug.adapters.vllm.DraftModelProposer"
PARD = "specplug_pard.vllm.PardProposer"
LENGTHS = {NGRAM: 8, SUFFIX: 8, DRAFT_MODEL: 3, PARD: 3}


def environment(**more: str) -> dict[str, str]:
    own = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # a core of our own would be one that others use
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": str(HERE),
    }
    return {**os.environ, **own, **more}


# --- the names of the host ----------------------------------------------------------------------------------------


def source_folders() -> list[Path]:
    return [Path(folder) for folder in os.environ.get("SPECPLUG_VLLM_SOURCES", "").split(os.pathsep) if folder]


@needs_vllm
def test_the_installed_release_has_every_name_that_is_used() -> None:
    command = "import importlib.util as u, importlib.metadata as m; print(u.find_spec('vllm').origin)"
    origin = subprocess.run([PYTHON, "-c", command], capture_output=True, text=True, check=True, env=environment())
    assert mismatches(Path(origin.stdout.strip().splitlines()[-1]).parent) == []


@pytest.mark.skipif(not source_folders(), reason="SPECPLUG_VLLM_SOURCES names no unpacked release")
@pytest.mark.parametrize("folder", source_folders(), ids=str)
def test_unpacked_releases_have_every_name_that_is_used(folder: Path) -> None:
    assert TESTED_RELEASES
    assert mismatches(folder) == []


# --- offline ------------------------------------------------------------------------------------------------------

MASK = 49151
"""The last id of SmolLM2, a rare word."""
PROMPTS = (
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return",
    "1 2 3 4 5 6 7 8 1 2 3 4 5 6 7 8 1 2 3",
    "The capital of France is",
    "Name: Ada, Role: engineer\nName: Bob, Role: editor\nName: Eve, Role:",
)


MAX_TOKENS = (40, 40, 24, 32)
Options = Callable[[str, Sequence[str], Sequence[int]], dict[str, Any]]


def target_folder() -> str:
    if not SMOLLM2.is_installed():
        pytest.skip(f"{SMOLLM2.name} is not installed: {SMOLLM2.install}")
    return str(smollm2_path())


def settings(path: str, num_speculative_tokens: int | None = None) -> dict[str, Any]:
    length = LENGTHS[path] if num_speculative_tokens is None else num_speculative_tokens
    return {"method": "custom_class", "model": path, "num_speculative_tokens": length}


@pytest.fixture
def options(successor_draft: Callable[..., str]) -> Options:
    """A proposer's own options for some prompts; a draft model follows what the target writes behind them."""

    def make(path: str, prompts: Sequence[str], max_tokens: Sequence[int]) -> dict[str, Any]:
        if path == NGRAM:
            return {"specplug": {"prompt_lookup_min": 2, "prompt_lookup_max": 5}}
        if path == SUFFIX:
            return {}
        written = plain(tuple(prompts), tuple(max_tokens))["texts"]
        texts = [prompt + text for prompt, text in zip(prompts, written, strict=True)]
        if path == DRAFT_MODEL:
            return {"specplug": {"model": successor_draft(texts), "use_heterogeneous_vocab": True}}
        return {"specplug": {"model": successor_draft(texts, tokenizer=target_folder(), pard_token=MASK)}}

    return make


def run_offline(job: Mapping[str, Any]) -> subprocess.CompletedProcess[str]:
    """In one process, which starts in half the time."""
    return subprocess.run(
        [PYTHON, str(HERE / "vllm_offline.py"), json.dumps(job)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=environment(VLLM_ENABLE_V1_MULTIPROCESSING="0"),
        cwd=HERE,
    )


@cache
def plain(prompts: tuple[str, ...], max_tokens: tuple[int, ...]) -> dict[str, Any]:
    return offline(prompts, max_tokens, None)


def offline(
    prompts: Sequence[str],
    max_tokens: Sequence[int],
    speculative_config: Mapping[str, Any] | None,
    additional_config: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    job = {
        "model": target_folder(),
        "prompts": list(prompts),
        "max_tokens": list(max_tokens),
        "speculative_config": speculative_config,
        "additional_config": additional_config or {},
        "max_num_seqs": 8,
    }
    ended = run_offline(job)
    log = ended.stdout + ended.stderr
    line = next((line for line in ended.stdout.splitlines() if line.startswith("FOUND ")), None)
    assert line is not None, log[-4000:]
    found: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    return found | {"log": log}


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("path", [NGRAM, SUFFIX, DRAFT_MODEL, PARD])
def test_offline_the_text_is_that_of_plain_decoding_and_the_counts_are_vllms(path: str, options: Options) -> None:
    expected = plain(PROMPTS, MAX_TOKENS)
    found = offline(PROMPTS, MAX_TOKENS, settings(path), options(path, PROMPTS, MAX_TOKENS))
    assert found["ids"] == expected["ids"]
    server, ours = found["server"], found["ours"]
    assert server["vllm:spec_decode_num_accepted_tokens"] > 20
    for theirs, name in (
        ("num_drafts", "num_drafts"),
        ("num_draft_tokens", "num_draft_tokens"),
        ("num_accepted_tokens", "num_verified_accepted_tokens"),
    ):
        assert server[f"vllm:spec_decode_{theirs}"] == ours[f"specplug:{name}"]
    assert ours["specplug:num_requests"] == len(PROMPTS)
    assert 'specplug: drafting with method "' in found["log"]


@needs_vllm
@pytest.mark.slow
def test_a_proposer_that_raises_costs_drafts_only() -> None:
    found = offline(PROMPTS, MAX_TOKENS, settings("vllm_raising.Raising", 4))
    assert found["ids"] == plain(PROMPTS, MAX_TOKENS)["ids"]
    assert found["ours"]['specplug:num_faults{reason="propose_raised:raises_later"}'] == 1
    assert len(re.findall(r"logged once", found["log"])) == 1


@needs_vllm
@pytest.mark.slow
def test_a_fault_of_the_configuration_ends_the_start_with_its_text() -> None:
    job = {
        "model": target_folder(),
        "prompts": ["a"],
        "max_tokens": [1],
        "speculative_config": settings(NGRAM, 4),
        "additional_config": {"specplug": {"prompt_lookup_mx": 3}},
        "max_num_seqs": 1,
    }
    ended = run_offline(job)
    assert ended.returncode != 0
    assert "Did you mean prompt_lookup_max" in ended.stdout + ended.stderr


# --- the server ---------------------------------------------------------------------------------------------------


class Server:
    """``vllm serve`` in a process of its own, with what it logs."""

    def __init__(self, port: int, process: subprocess.Popen[str], log: Path, model: str) -> None:
        self.port = port
        self.model = model
        self._process = process
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None and self.get("/health")[0] == 200

    def get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def wait(self, limit_s: float = 400) -> None:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            assert self._process.poll() is None, self.log[-4000:]
            with contextlib.suppress(OSError):
                if self.get("/health")[0] == 200:
                    return
            time.sleep(0.5)
        raise AssertionError(self.log[-4000:])

    def complete(self, prompt: str, max_tokens: int, *, cancel_after: int | None = None) -> str | None:
        """The text, streamed; None when the client went away after so many pieces of it."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            pieces: list[str] = []
            for raw in answer:
                line = raw.decode().strip()
                if line.startswith("data: {"):
                    pieces.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
                if cancel_after is not None and len(pieces) >= cancel_after:
                    return None
            return "".join(pieces)
        finally:
            connection.close()

    def counters(self) -> dict[str, float]:
        """Every counter of /metrics without its labels, those of one name added up."""
        totals: dict[str, float] = {}
        for name, value in re.findall(r"^([\w:]+)_total(?:\{[^}]*\})? (\S+)$", self.get("/metrics")[1], re.MULTILINE):
            totals[name] = totals.get(name, 0.0) + float(value)
        return totals


@contextlib.contextmanager
def serving(
    tmp_path: Path, speculative_config: Mapping[str, Any], own_options: Mapping[str, Any], **more: str
) -> Iterator[Server]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    model = target_folder()
    command = [PYTHON, "-m", "vllm.entrypoints.cli.main", "serve", model, "--port", str(port), "--host", "127.0.0.1"]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "16"]
    command += ["--speculative-config", json.dumps(speculative_config)]
    command += ["--additional-config", json.dumps(own_options)]
    more |= {"PYTHONPATH": os.pathsep.join((str(HERE), str(_named_vllm(tmp_path))))}
    log = tmp_path / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, text=True, env=environment(**more), cwd=HERE, start_new_session=True
        )
    try:
        server = Server(port, process, log, model)
        server.wait()
        yield server
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:  # its engine and workers are processes of their own
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _named_vllm(folder: Path) -> Path:
    """The command line asks for the version of "vllm", which the CPU build, "vllm-cpu", does not answer."""
    metadata = folder / "named" / "vllm-0.32.0+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    return metadata.parent.parent


def busy_prompts(number: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Distinct prompts that repeat themselves, and different lengths to write."""
    words = ("red", "green", "blue", "north", "south", "apple", "river", "stone")
    prompts = []
    for each in range(number):
        first, second = words[each % 8], words[(each // 8 + each) % 8]
        prompts.append(f"{first} {second} {each}, {first} {second} {each}, {first} {second} {each}, {first}")
    return tuple(prompts), tuple(4 + 3 * (each % 11) for each in range(number))


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("path", [NGRAM, SUFFIX, DRAFT_MODEL])
def test_64_requests_at_once_some_of_them_given_up(path: str, options: Options, tmp_path: Path) -> None:
    number = 64
    prompts, max_tokens = busy_prompts(number)
    expected = plain(prompts, max_tokens)["texts"]
    shared = tmp_path / "shared"
    shared.mkdir()
    texts: list[str | None] = [""] * number
    given_up = {each for each in range(number) if each % 5 == 3}
    own = options(path, prompts, max_tokens)
    with serving(tmp_path, settings(path), own, PROMETHEUS_MULTIPROC_DIR=str(shared)) as server:
        assert server.complete(prompts[10], max_tokens[10]) == expected[10]
        counters = _settled(server, at_most_more=0)
        assert counters["vllm:spec_decode_num_accepted_tokens"] > 0

        def run(each: int) -> None:
            cancel_after = 2 if each in given_up else None
            texts[each] = server.complete(prompts[each], max_tokens[each], cancel_after=cancel_after)

        clients = [threading.Thread(target=run, args=(each,)) for each in range(number)]
        for client in clients:
            client.start()
        for client in clients:
            client.join(timeout=500)
        assert not any(client.is_alive() for client in clients)
        assert server.is_alive
        for each in range(number):
            assert texts[each] == (None if each in given_up else expected[each])
        assert server.complete(prompts[0], max_tokens[0]) == expected[0], "and it goes on"
        # a draft whose request was given up while it was verified: the scheduler no longer counts it
        counters = _settled(server, at_most_more=len(given_up))
        assert counters["vllm:spec_decode_num_accepted_tokens"] > number
        assert counters.get("specplug:num_faults", 0) == 0


def _settled(server: Server, *, at_most_more: int) -> dict[str, float]:
    """The counters, once ours are as high as vLLM's; ours may hold a few more drafts."""
    counters: dict[str, float] = {}
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        counters = server.counters()
        more = {
            name: counters.get(f"specplug:{ours}", -1) - counters.get(f"vllm:spec_decode_{name}", 0)
            for name, ours in (
                ("num_drafts", "num_drafts"),
                ("num_draft_tokens", "num_draft_tokens"),
                ("num_accepted_tokens", "num_verified_accepted_tokens"),
            )
        }
        if (
            0 <= more["num_drafts"] <= at_most_more
            and min(more.values()) >= 0
            and (at_most_more or not any(more.values()))
        ):
            return counters
        time.sleep(0.5)
    raise AssertionError(counters)


@needs_vllm
@pytest.mark.slow
def test_a_server_whose_proposer_raises_stays_alive(tmp_path: Path) -> None:
    prompts, max_tokens = busy_prompts(64)
    with serving(tmp_path, settings("vllm_raising.Raising", 4), {}) as server:
        for each in (0, 10, 21):
            assert server.complete(prompts[each], max_tokens[each]) == plain(prompts, max_tokens)["texts"][each]
        assert server.is_alive
        assert len(re.findall("logged once", server.log)) == 1
