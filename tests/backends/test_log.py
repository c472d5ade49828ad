"""Of a long log, the line that says why."""

from __future__ import annotations

import pytest

from peagle.backends.vllm.log import LONGEST, last_words

# As vLLM 0.32 wrote them, shortened.
PYDANTIC = """\
(APIServer pid=1) INFO 11-15 05:56:00 [system_utils.py:255] ready to go
Traceback (most recent call last):
  File "vllm/engine/arg_utils.py", line 1, in create_model_config
    return ModelConfig(
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, Unknown quantization method: bogus. [type=value_error, input_value=ArgsKwargs(())]
    For further information visit https://errors.pydantic.dev
"""
ENGINE = """\
(EngineCore pid=2) Process EngineCore:
(Worker pid=3) ERROR 11-15 05:56:49 [executor.py:953] Traceback (most recent call last):
(Worker pid=3) ERROR 11-15 05:56:49 [executor.py:953]     raise NoError("not at its start")
(Worker pid=3) ERROR 11-15 05:56:49 [executor.py:953] safetensors.SafetensorError: bad header
(EngineCore pid=2) ERROR 11-15 05:56:50 [core.py:9] Exception: WorkerProc initialization failed
Traceback (most recent call last):
    raise RuntimeError(
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""
USAGE = """\
usage: api_server.py [-h]
api_server.py: error: unrecognized arguments: --no-such-flag
"""
COLOURED = "\x1b[0;36m(EngineCore pid=2)\x1b[0;0m ValueError: no memory\n"


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (PYDANTIC, "Unknown quantization method: bogus."),
        (ENGINE, "safetensors.SafetensorError: bad header"),
        (USAGE, "unrecognized arguments: --no-such-flag"),
        ("vllm serve: error: argument --port: invalid int\n", "argument --port: invalid int"),
        (COLOURED, "ValueError: no memory"),
        ("Segmentation fault\n\n  \n", "Segmentation fault"),
        ("NotImplementedError\n", "NotImplementedError"),
        ("", "its log is empty"),
    ],
)
def test_the_root_error_is_found(log: str, words: str) -> None:
    assert last_words(log.splitlines(keepends=True)) == words


def test_only_wrappers_are_better_than_nothing() -> None:
    line = "RuntimeError: Engine core initialization failed. See root cause above."
    assert last_words([line]) == line


def test_words_that_never_end_are_cut() -> None:
    assert len(last_words(["ValueError: " + "x" * 5000])) == LONGEST + 3
