"""What every launch script shares: its own set of flags, and how it ends.

    FLAGS = cli.new_flags()
    _CONFIG = flags.DEFINE_string("config", None, "…", flag_values=FLAGS)

    def main() -> None: ...

    def cli() -> int:  # the console script
        return run(main, FLAGS)

Exit status: 0 if the job was done, 2 for bad input with one line on stderr, 130 if interrupted. Anything else is a
fault of the program and shows its traceback (1). In a job of several processes (`launch.mesh_flags`) all end together:
the status is 0 only if every process did its part, and 1 where another one ended it.
"""

import logging
import os
import pathlib
import sys
from collections.abc import Callable, Sequence

from absl import flags

from dsv41.config import DSV41Error
from dsv41.sharding.processes import fail_processes, finish_processes, running_processes
from pallas_kernels.dispatch import KernelUnavailable

BAD_INPUT = 2
INTERRUPTED = 130
_BROKEN_PIPE = 141  # what a shell reports for a program stopped by SIGPIPE


def new_flags() -> flags.FlagValues:
    """`--help` and `--verbose`, to add a script's own flags to.

    Each script has its own set, because two scripts imported into one process may define the same name.
    """
    values = flags.FlagValues()
    flags.DEFINE_bool("help", False, "Show this text and stop.", flag_values=values)
    flags.DEFINE_bool("verbose", False, "Log progress on stderr, not only warnings.", flag_values=values)
    return values


def _parse(values: flags.FlagValues, argv: Sequence[str]) -> None:
    values.unparse_flags()  # back to the defaults: a second run in one process must not see the first one's
    try:
        rest = values(list(argv))[1:]
    except flags.Error as e:
        raise DSV41Error(str(e)) from e
    if rest:
        raise DSV41Error(f"unexpected argument {rest[0]!r}: everything is given as --flag=value")


def _fail(program: str, error: BaseException, status: int, message: str) -> int:
    """Prints one line; in a job of several processes this process ends here."""
    job = running_processes()
    line = f"{program}: {' '.join(message.split())}"
    fail_processes(error, status, line if job is None else f"[{job.label}] {line}")
    print(line, file=sys.stderr)
    return status


def run(main: Callable[[], None], values: flags.FlagValues, argv: Sequence[str] | None = None) -> int:
    """Parses the command line into `values`, calls `main` and returns the exit status.

    Args:
      main: does the job; raises `DSV41Error` for input that the user can mend.
      values: the script's flags, made by `new_flags`.
      argv: program name and arguments; those of the process if None.
    """
    argv = sys.argv if argv is None else argv
    program = pathlib.Path(argv[0]).stem
    try:
        _parse(values, argv)
        if values.help:
            print(sys.modules[main.__module__].__doc__, values.get_help(include_special_flags=False), sep="\n")
        else:
            if values.verbose:
                logging.basicConfig(level=logging.INFO, stream=sys.stderr)
            main()
        sys.stdout.flush()
        finish_processes()
    except (DSV41Error, KernelUnavailable) as e:
        return _fail(program, e, BAD_INPUT, str(e))
    except KeyboardInterrupt as e:
        return _fail(program, e, INTERRUPTED, "interrupted")
    except BrokenPipeError as e:
        fail_processes(e, _BROKEN_PIPE, "")
        # The reader of our output has left; without this the interpreter complains once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except SystemExit as e:
        # A script that ends itself has printed why.
        status = 0 if e.code is None else e.code if isinstance(e.code, int) else 1
        if status:
            fail_processes(e, status, "")
        else:
            finish_processes()
        raise
    except BaseException as e:
        fail_processes(e, 1)
        raise
    return 0


def overrides(settings: list[str]) -> dict[str, str]:
    """The `key=value` strings of --set as a dict."""
    pairs = [setting.partition("=") for setting in settings]
    for key, equals, value in pairs:
        if not equals:
            raise DSV41Error(f"--set: expected key=value, got {key + value!r}")
    return {key: value for key, _, value in pairs}


def make_directory(flag: str, path: str) -> pathlib.Path:
    """The directory that a flag names, made if it is missing.

    Raises:
      DSV41Error: it cannot be made.
    """
    directory = pathlib.Path(path)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise DSV41Error(f"--{flag}: cannot make the directory {directory} ({e.strerror or e})") from e
    return directory
