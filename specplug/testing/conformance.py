"""All conformance checks together: one class to subclass in a plugin's tests, one function to call without pytest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

from specplug.methods import Capabilities, PluginContext
from specplug.testing.checks import (
    check_batch_permutation,
    check_contract,
    check_leaked_state,
    check_lifecycle,
    check_proposes,
    check_rollback,
)
from specplug.testing.host_checks import (
    check_eos_inside_draft,
    check_greedy_equality,
    check_hook_calls,
    check_length_limits,
)
from specplug.testing.rig import CheckFailed, InstalledMethod, MakeProposer, Rig
from specplug.testing.second_process import check_second_process

__all__ = ["CHECKS", "Check", "CheckResult", "ProposerConformance", "run_checks"]

Check: TypeAlias = Callable[[MakeProposer, Rig], None]

CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        check.__name__.removeprefix("check_"): check
        for check in (
            check_contract,
            check_proposes,
            check_batch_permutation,
            check_lifecycle,
            check_leaked_state,
            check_rollback,
            check_greedy_equality,
            check_length_limits,
            check_eos_inside_draft,
            check_hook_calls,
            check_second_process,
        )
    }
)
"""Every check by name, in the order in which to read failures: later ones build on earlier ones."""


@dataclass(frozen=True)
class CheckResult:
    """``failure``: None when the check passed, else what it saw. ``advice``: the check's docstring."""

    name: str
    failure: str | None
    advice: str


def run_checks(proposer: str | MakeProposer, rig: Rig | None = None) -> list[CheckResult]:
    """Run every check on an installed method (by name) or on what ``proposer(context)`` builds; no pytest needed."""
    make_proposer = InstalledMethod(proposer) if isinstance(proposer, str) else proposer
    rig = _completed(rig or Rig(), make_proposer)
    return [
        CheckResult(name, _failure(check, make_proposer, rig), check.__doc__ or "") for name, check in CHECKS.items()
    ]


class ProposerConformance:
    """Subclass it in a plugin's tests; pytest then runs every check as ``test_conformance[NAME]``.

    ::

        class TestHello(ProposerConformance):
            method = "hello"

    ``method``: an installed method's name, with ``options`` (its own configuration keys). For an object that is not
    installed override ``make_proposer`` instead. ``rig``: see :class:`Rig`. ``expected_failures``: check -> reason;
    such a check must fail (a strict xfail). Checks cannot be overridden.
    """

    method: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    rig: ClassVar[Rig] = Rig()
    expected_failures: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def make_proposer(self, context: PluginContext) -> object:
        """A fresh proposer; by default the installed ``method``."""
        return self._installed()(context)

    def test_conformance(self, check: str, request: Any) -> None:
        """One check; its docstring, shown on failure, says where to look."""
        if check in self.expected_failures:
            _expect_failure(request, self.expected_failures[check])
        is_default = type(self).make_proposer is ProposerConformance.make_proposer
        make_proposer: MakeProposer = self._installed() if is_default else self.make_proposer
        failure = _failure(CHECKS[check], make_proposer, _completed(self.rig, make_proposer))
        if failure is not None:
            raise CheckFailed(f"{failure}\n\ncheck_{check}: {CHECKS[check].__doc__}")

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Parametrise over the checks."""
        if metafunc.function.__name__ == "test_conformance":
            metafunc.parametrize("check", list(CHECKS))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in ("test_conformance", "pytest_generate_tests"):
            if getattr(cls, name) is not getattr(ProposerConformance, name):
                raise TypeError(
                    f"{cls.__name__}.{name} overrides the conformance checks; to exempt one, write "
                    "expected_failures = {check: reason}"
                )
        for name, reason in cls.expected_failures.items():
            if name not in CHECKS:
                raise TypeError(f"{cls.__name__}.expected_failures names {name!r}; the checks are {', '.join(CHECKS)}")
            if not str(reason).strip():
                raise TypeError(f"{cls.__name__}.expected_failures[{name!r}] must say why")

    def _installed(self) -> InstalledMethod:
        if not self.method:
            raise TypeError(f"{type(self).__name__} must set `method` to an installed method or override make_proposer")
        return InstalledMethod(self.method, dict(self.options))


def _completed(rig: Rig, make_proposer: MakeProposer) -> Rig:
    """The rig, with an installed method's own capabilities where none were given."""
    if isinstance(make_proposer, InstalledMethod) and rig.capabilities == Capabilities():
        return replace(rig, capabilities=make_proposer.capabilities)
    return rig


def _failure(check: Check, make_proposer: MakeProposer, rig: Rig) -> str | None:
    try:
        check(make_proposer, rig)
    except CheckFailed as failure:
        return str(failure)
    return None


def _expect_failure(request: Any, reason: str) -> None:
    import pytest

    request.applymarker(pytest.mark.xfail(reason=reason, strict=True, raises=CheckFailed))
