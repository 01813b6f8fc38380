"""The check that a proposer can be rebuilt in another process; run as a module, the other process."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from specplug.testing.checks import text_drafts
from specplug.testing.rig import CheckFailed, MakeProposer, Rig

__all__ = ["check_second_process"]

DEFAULT_RIG = Rig()
TIMEOUT_S = 120


def check_second_process(make_proposer: MakeProposer, rig: Rig = DEFAULT_RIG) -> None:
    """A freshly started process that builds the proposer anew gets the same drafts, with other hashes of strings.

    When it fails: ``make_proposer`` (and the rig's ``make_target``) must be defined at the top level of a module, so
    that it can be pickled, and must not rely on what the test set up before; the proposer must not depend on the order
    of a set, on ``hash()`` or ``id()``, on the time, or on registration that happened in the parent only.
    """
    try:
        job = pickle.dumps((make_proposer, rig))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise CheckFailed(f"make_proposer cannot be sent to another process: {error}") from error
    expected = text_drafts(make_proposer, rig)
    seen = _run(pickle.dumps((list(_module_files(make_proposer, rig)), job)))
    if seen != json.loads(json.dumps(expected)):
        raise CheckFailed(f"drafts in this process are {expected}, in a second process {seen}")


def _run(job: bytes) -> Any:
    environment = {**os.environ, "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"}
    ended = subprocess.run(
        [sys.executable, "-m", "specplug.testing.second_process"],
        input=job,
        capture_output=True,
        timeout=TIMEOUT_S,
        env=environment,
        check=False,
    )
    if ended.returncode:
        raise CheckFailed(f"the second process failed: {ended.stderr.decode(errors='replace')[-2000:]}")
    return json.loads(ended.stdout)


def _module_files(*objects: Any) -> Iterator[tuple[str, str]]:
    """(name, file) of the modules that define the objects: a test module often cannot be imported by its name."""
    names = {_module_of(value) for one in objects for value in (one, *getattr(one, "__dict__", {}).values())}
    for name in sorted(names):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file and not name.startswith("specplug."):
            yield name, file


def _module_of(value: Any) -> str:
    owner = getattr(value, "__self__", value)
    named = owner if hasattr(owner, "__qualname__") else type(owner)
    return str(getattr(named, "__module__", ""))


def _serve() -> None:
    """Read a job from standard input, write its drafts to standard output."""
    files, job = pickle.loads(sys.stdin.buffer.read())  # written by the parent a moment ago
    for name, file in files:
        _make_importable(name, file)
    make_proposer, rig = pickle.loads(job)
    json.dump(text_drafts(make_proposer, rig), sys.stdout)


def _make_importable(name: str, file: str) -> None:
    try:
        importlib.import_module(name)
    except ImportError:
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "__main__":
    _serve()
