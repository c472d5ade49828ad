"""docs/cli.md, written by typer from the commands themselves.

    python docs/cli_page.py

A test compares the page with what this script would write.
"""

from __future__ import annotations

import html
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).with_name("cli.md")

INTRODUCTION = """\
<!-- Written by docs/cli_page.py. Do not edit. -->
# Command line

- `MODEL` is a folder in Hugging Face's layout, a Hugging Face id, or the built-in `smollm2-135m`. A
  `HEAD` is a folder, a Hugging Face id, or a name that `peagle heads` lists.
- Flags are vLLM's where vLLM has one, and may be written as for vLLM: with underscores
  (`--max_model_len`), and single keys of JSON options with dots
  (`--speculative-config.model HEAD`).
- `--config FILE` takes flags from a YAML file, for every verb: `max-tokens: 64`. Flags on the
  command line override it, and an unknown key is an error.
- Data goes to stdout, everything else to stderr: progress as bars on a terminal and as lines
  elsewhere, remarks and errors. `-q` leaves results and errors, `-v` adds a log; both may stand
  before or after the verb. With `--json` the last line of stdout is one JSON
  document.
- `--prompts-file` takes one prompt per line, as text or as JSON objects with `prompt`, `messages`
  or `turns` (the first is used); `-` is stdin. A line that cannot be answered is named on stderr,
  the others are answered, and the exit code is 2.

Exit codes:

- 0: done.
- 1: a check failed (`demo` or `bench --batch-invariant` found a different answer, `bench compare` a
  regression, `doctor` an error), or it is a bug of ours.
- 2: the command, an input or the machine (a full disk, a folder that may not be written) was wrong;
  stderr has one line and a hint.
- 130, 143: Ctrl-C, SIGTERM. What was finished is kept: `prepare`, `capture`, `train` and `bench` go
  on where they were, and `generate` prints the answers that it has.
- 141: whoever read the output went away, as `head` does.

| environment variable | meaning |
|---|---|
| `PEAGLE_CACHE` | where models, exports and compiled kernels are kept (`~/.cache/peagle`) |
| `PEAGLE_DEBUG=1` | tracebacks |
| `PEAGLE_LOG_LEVEL` | `ERROR` as `-q`, `INFO` as `-v`, `DEBUG` as `-vv` |
| `NO_COLOR=1` | no colours |
| `PEAGLE_CPU_KERNELS=0` | torch's operations instead of the C kernels |
| `PEAGLE_CFLAGS` | more flags for the compiler of the C kernels |

"""


def cli_page() -> str:
    command = [
        sys.executable,
        "-m",
        "typer",
        "peagle.cli.main",
        "utils",
        "docs",
        "--name",
        "peagle",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    reference = html.unescape(done.stdout).strip()  # outside of code nothing looks like a tag
    return INTRODUCTION + reference.replace("# `peagle`", "## `peagle`", 1) + "\n"


if __name__ == "__main__":
    PAGE.write_text(cli_page(), encoding="utf-8")
