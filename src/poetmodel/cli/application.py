"""The application: its commands, and failures as sentences and exit statuses."""

import sys
from typing import Annotated, Any, Final, cast

import typer
from typer.core import TyperCommand, TyperGroup

from poetmodel.cli import (
    choosing,
    diff,
    explain,
    explore,
    exporting,
    inspect,
    limits,
    plan,
    report,
    solve,
    sweep,
    tracing,
    verify,
)
from poetmodel.cli.failures import ExitStatus, mute, print_faults, report_error
from poetmodel.cli.output import set_quiet
from poetmodel.errors import PoetModelError
from poetmodel.files import installed_version, licence
from poetmodel.version import __version__

FRONT_ENDS: Final = ("torch", "onnx", "keras")
"""Packages whose models are read."""
USAGE_ERROR: Final = cast("type[Exception]", typer.BadParameter.__mro__[1])
"""Base class of all usage errors; typer brings click along or imports it, by version."""

WELCOME: Final = """\
poetmodel finds training schedules that need the least energy within a RAM budget.

Try this first: train a real network on a Raspberry Pi in 40 % of the RAM it would take.

  poetmodel solve mobilenetv2 --device rpi4b --ram 40%

Then look around:

  poetmodel models                  the built-in networks
  poetmodel devices                 the built-in devices
  poetmodel inspect mobilenetv2     how much RAM a network needs
  poetmodel solve --help            all limits and options
  poetmodel --version               versions, and licences of the solvers
"""


def _plain_flags(params: list[Any]) -> list[Any]:
    """Return options with nothing behind those that take no value, such as ``--json``."""
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


class Subcommand(TyperCommand):
    """A command, with help that shows a flag as a flag."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return its options and arguments."""
        return _plain_flags(super().get_params(ctx))


class Application(TyperGroup):
    """The command group; reports every failure with a plain sentence and an exit status."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options beside those of commands."""
        return _plain_flags(super().get_params(ctx))

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run, and exit with the status of the command."""
        extra["standalone_mode"] = False
        set_quiet(False)
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")
        try:
            status = self._run(*args, **extra)
            sys.stdout.flush()
            sys.stderr.flush()
        except BrokenPipeError:
            mute(sys.stdout)
            mute(sys.stderr)
            status = ExitStatus.CLOSED_PIPE
        except OSError as error:  # a full disk, say
            mute(sys.stdout)
            status = report_error(error)
        sys.exit(int(status or 0))

    def _run(self, *args: Any, **extra: Any) -> int | None:
        try:
            status: int | None = super().main(*args, **extra)
        except USAGE_ERROR as error:
            print_faults([_usage_sentence(error)])
            return ExitStatus.BAD_INPUT
        except (KeyboardInterrupt, typer.Abort):
            return ExitStatus.INTERRUPTED
        except SystemExit as end:
            # rich and click exit with 1 on a closed pipe.
            if _is_closed_pipe(end):
                raise BrokenPipeError from end
            return end.code if isinstance(end.code, int) else ExitStatus.FAILURE
        except BrokenPipeError:
            raise
        except (PoetModelError, OSError) as error:
            return report_error(error)
        return status


app = typer.Typer(
    name="poetmodel",
    cls=Application,
    help="Train neural networks on devices with too little memory, for provably minimal energy.",
    epilog="Example: poetmodel solve mobilenetv2 --device rpi4b --ram 40%",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from poetmodel.backends.registry import solver_packages

        print(f"poetmodel {__version__}")
        solvers = solver_packages()
        for package in (*solvers, *FRONT_ENDS):
            terms = licence(package) if package in solvers else ""
            remark = f" (licence: {terms})" if terms else ""
            print(f"{package} {installed_version(package) or 'is not installed'}{remark}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context,
    *,
    version: Annotated[  # noqa: ARG001 - acts while the arguments are parsed
        bool,
        typer.Option(
            "--version",
            help="Print the versions, and licences of solvers.",
            callback=_print_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(WELCOME, end="")


for _command in (
    solve.solve,
    limits.limits,
    choosing.choose,
    plan.plan,
    tracing.trace,
    tracing.profile,
    exporting.export,
    inspect.state,
    sweep.sweep,
    sweep.merge,
    report.report,
    explore.explore,
    sweep.bench,
    inspect.inspect,
    verify.verify,
    explain.explain,
    diff.diff,
    inspect.models,
    inspect.devices,
):
    app.command(_command.name, cls=Subcommand, epilog=_command.epilog)(_command.run)


def _usage_sentence(error: Exception) -> str:
    words = " ".join(error.format_message().split())  # type: ignore[attr-defined]
    message = words.replace("Value error, ", "").rstrip(".?")
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "poetmodel"
    return f"{message}; see '{command} --help'"


def _is_closed_pipe(end: BaseException) -> bool:
    cause = end.__context__
    return cause is not None and (isinstance(cause, BrokenPipeError) or _is_closed_pipe(cause))
