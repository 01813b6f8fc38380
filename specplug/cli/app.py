"""The typer application. Errors that specplug raises on purpose become one message and an exit code."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from specplug import __version__
from specplug.cli.console import error
from specplug.cli.demo import demo
from specplug.cli.doctor import doctor
from specplug.cli.explain import explain
from specplug.cli.generate import generate
from specplug.cli.plugins import plugins
from specplug.errors import ConfigError, RequestError, SpecplugError

__all__ = ["app", "main"]

USAGE_ERROR = 2
FAILURE = 1
INTERRUPTED = 130


class _Group(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the reader of our output has left, which typer ends quietly
            raise
        except (ConfigError, RequestError) as fault:
            error(str(fault))
            raise typer.Exit(USAGE_ERROR) from fault
        except (SpecplugError, OSError) as fault:
            error(str(fault))
            raise typer.Exit(FAILURE) from fault
        except KeyboardInterrupt as fault:
            error("interrupted")
            raise typer.Exit(INTERRUPTED) from fault


app = typer.Typer(
    name="specplug",
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"specplug {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Speculative decoding as plugins.

    Exit codes: 0 done; 1 a model or plugin failed; 2 the command line or the configuration cannot be.
    """


app.command()(generate)
app.command()(plugins)
app.command()(explain)
app.command()(demo)
app.command()(doctor)


def main() -> None:
    """The console script."""
    app()
