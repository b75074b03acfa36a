"""The command-line application: registers the commands, converts failures to exit statuses."""

import logging
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
from poetmodel.cli.failures import (
    ExitStatus,
    WarningHandler,
    discard_output,
    print_errors,
    report_error,
)
from poetmodel.cli.output import set_quiet
from poetmodel.errors import PoetModelError
from poetmodel.files import installed_version, licence
from poetmodel.version import __version__

_LOG: Final = logging.getLogger("poetmodel")

FRONT_ENDS: Final = ("torch", "onnx", "keras")
"""Packages whose models can be captured or read."""
USAGE_ERROR: Final = cast("type[Exception]", typer.BadParameter.__mro__[1])
"""Base class of all usage errors. The class belongs to click, which typer vendors or imports,
depending on typer's version."""

WELCOME: Final = """\
poetmodel finds training schedules with minimum energy within a RAM budget.

Try this first: train a real network on a Raspberry Pi in 40 % of the RAM it would take.

  poetmodel solve mobilenetv2 --device rpi4b --ram 40%

Then try:

  poetmodel models                  the built-in networks
  poetmodel devices                 the built-in devices
  poetmodel inspect mobilenetv2     how much RAM a network needs
  poetmodel solve --help            all limits and options
  poetmodel --version               versions, and licences of the solvers
"""


def _hide_flag_metavars(params: list[Any]) -> list[Any]:
    """Remove the value placeholder of flags, such as ``--json``, from help; return `params`."""
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


class Subcommand(TyperCommand):
    """A command whose help shows flags without a placeholder."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options and arguments of the command; flags have no placeholder."""
        return _hide_flag_metavars(super().get_params(ctx))


class Application(TyperGroup):
    """The command group; prints a message for each expected failure and exits with its status."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options of the application itself; flags have no placeholder."""
        return _hide_flag_metavars(super().get_params(ctx))

    def main(self, *args: Any, **options: Any) -> Any:
        """Run a command and exit with its status; raise unexpected exceptions.

        Until it ends, ``--quiet`` applies and warnings that poetmodel logs are printed; stdout and
        stderr escape characters that their encoding lacks. A closed pipe ends without a message, a
        full disk is an error.
        """
        options["standalone_mode"] = False
        handler = WarningHandler(logging.WARNING)
        _LOG.addHandler(handler)
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")
        try:
            status = self._run_command(*args, **options)
            sys.stdout.flush()
            sys.stderr.flush()
        except BrokenPipeError:
            discard_output(sys.stdout)
            discard_output(sys.stderr)
            status = ExitStatus.CLOSED_PIPE
        except OSError as error:  # such as a full disk
            discard_output(sys.stdout)
            status = report_error(error)
        finally:
            set_quiet(False)
            _LOG.removeHandler(handler)
        sys.exit(int(status or 0))

    def _run_command(self, *args: Any, **options: Any) -> int | None:
        """Run the command line; return its exit status, 0 or None for success.

        Errors of users and of poetmodel are printed; Ctrl-C gives INTERRUPTED without a message.
        All other exceptions, and the `BrokenPipeError` of a closed pipe, propagate.
        """
        try:
            status: int | None = super().main(*args, **options)
        except USAGE_ERROR as error:
            print_errors([_usage_sentence(error)])
            return ExitStatus.BAD_INPUT
        except (KeyboardInterrupt, typer.Abort):
            return ExitStatus.INTERRUPTED
        except SystemExit as exit_error:
            # rich and click exit with 1 on a closed pipe.
            if _is_from_closed_pipe(exit_error):
                raise BrokenPipeError from exit_error
            return exit_error.code if isinstance(exit_error.code, int) else ExitStatus.FAILURE
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


def _print_version(enabled: bool) -> None:
    """Print versions of package, solvers (with licences) and front ends, and exit, if `enabled`."""
    if enabled:
        from poetmodel.backends.registry import solver_packages

        print(f"poetmodel {__version__}")
        solvers = solver_packages()
        for package in (*solvers, *FRONT_ENDS):
            terms = licence(package) if package in solvers else ""
            remark = f" (licence: {terms})" if terms else ""
            print(f"{package} {installed_version(package) or 'is not installed'}{remark}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _print_welcome(
    context: typer.Context,
    *,
    version: Annotated[  # noqa: ARG001 - its callback prints the version
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
    """Return the message of a `USAGE_ERROR` in one line, with a pointer to the command's help."""
    text = " ".join(error.format_message().split())  # type: ignore[attr-defined]
    message = text.replace("Value error, ", "").rstrip(".?")
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "poetmodel"
    return f"{message}; see '{command} --help'"


def _is_from_closed_pipe(error: BaseException) -> bool:
    """Return whether an error was raised while a `BrokenPipeError` was handled, also indirectly."""
    cause = error.__context__
    return cause is not None and (isinstance(cause, BrokenPipeError) or _is_from_closed_pipe(cause))
