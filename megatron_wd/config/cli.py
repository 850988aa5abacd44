"""What every command line shares: the way from an exception to a message and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

from megatron_wd.config.errors import UserError

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_SAVED = 3


def print_error(error: BaseException) -> None:
    """Prints `error: ...` on stderr, one line for each line of the message."""
    for line in str(error).splitlines() or [type(error).__name__]:
        print(f"error: {line}", file=sys.stderr)


def run_main(main: Callable[[list[str] | None], int | None]) -> int:
    """Runs a command line's main function; meant as `sys.exit(run_main(main))`.

    Args:
        main: Takes the arguments (None for sys.argv) and returns the exit code (None for 0).

    Returns:
        The exit code: 0 done, 2 for a UserError, 1 for anything else; main may also return 3
        (stopped by a signal after saving).
    """
    try:
        code = main(None)
        sys.stdout.flush()
        return EXIT_DONE if code is None else code
    except UserError as error:
        print_error(error)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("stopped by the keyboard", file=sys.stderr)
        return EXIT_FAILED
    except BrokenPipeError:
        # The reader (`| head`) has gone; what Python still flushes when it exits goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except Exception:
        traceback.print_exc()
        return EXIT_FAILED
