"""The process of the command `peagle`, which is `python -m peagle`: signals, then the command."""

from __future__ import annotations

import os
import signal
import sys

CONVENTIONAL = 128  # + the signal's number


def run() -> None:
    # Until there is something to clean up a signal ends us at once, whatever is being imported.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _frame: os._exit(CONVENTIONAL + received))

    from peagle.cli.main import main
    from peagle.processes import raise_interruption

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, raise_interruption)
    code = main(sys.argv[1:])
    # While Python takes itself down an exception would be a traceback.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    sys.exit(code)


if __name__ == "__main__":
    run()
