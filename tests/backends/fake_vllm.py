"""An executable `vllm` for tests: answers /health, or dies as FAKE_VLLM says. Has one child."""

from __future__ import annotations

import os
import socket
import stat
import sys
from pathlib import Path

SCRIPT = """#!{python}
import http.server, os, signal, subprocess, sys

if sys.argv[1] == "--version":
    print(os.environ.get("FAKE_VLLM_VERSION", "0.32.0"))
    sys.exit(0)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(os.environ["FAKE_VLLM_PIDS"], "w") as file:
    file.write(f"{{os.getpid()}} {{child.pid}}")
print("INFO starting", *sys.argv[1:], flush=True)
behaviour = os.environ.get("FAKE_VLLM", "")
if behaviour == "dies":
    print("(APIServer pid=7) Traceback (most recent call last):")
    print("(EngineCore pid=8) ERROR 10-01 12:00:00 [core.py:9] ValueError: no such head")
    print("(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause")
    sys.exit(1)
if behaviour == "shot":
    os.kill(os.getpid(), signal.SIGKILL)

class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass

if behaviour == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
"""


def write_fake_vllm(folder: Path) -> Path:
    script = folder / "bin" / "vllm"
    script.parent.mkdir(parents=True)
    script.write_text(SCRIPT.format(python=sys.executable))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def is_running(pid: int) -> bool:
    """A zombie is not: nobody may be there to reap an orphan."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return fields[0] not in ("Z", "X")


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


def path_with(folder: Path) -> str:
    return f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin"
