"""`peagle generate`: what reaches the engine, what reaches stdout, and which prompts fail."""

from __future__ import annotations

import gzip
import io
import json
import sys
from functools import partial
from pathlib import Path

import pytest

from peagle.cli.generate import BatchResult, document
from peagle.cli.prompt_files import NamedPrompt
from peagle.config import EngineConfig
from peagle.outputs import CompletionOutput, Logprob, RequestOutput

from .fakes import ANSWER, CONTEXT, FakeLLM, Shell


def test_answer_goes_to_stdout_and_stats_to_stderr(shell: Shell) -> None:
    assert shell("generate", "m", "Hi", "--spec-method", "ngram") == 0
    assert shell.out == f"{ANSWER}\n"
    assert "mean acceptance length 3.00, per position 1.00 1.00 0.00" in shell.err
    assert "13 tokens" in shell.err


def test_chat_template_is_applied_unless_raw(shell: Shell) -> None:
    shell("generate", "m", "Hi")
    assert shell.llm.requests == ["<user>Hi"]
    shell("generate", "m", "Hi", "--raw")
    assert shell.llm.requests == ["Hi"]


def test_model_without_a_template_gets_the_prompt_as_it_is(shell: Shell) -> None:
    shell.make = partial(FakeLLM, chat_template=None)
    shell("generate", "m", "Hi")
    assert shell.llm.requests == ["Hi"]


def test_system_message_comes_first(shell: Shell) -> None:
    shell("generate", "m", "Hi", "--system", "Be brief")
    assert shell.llm.requests == ["<system>Be brief<user>Hi"]


def test_several_answers_have_headers(shell: Shell) -> None:
    shell("generate", "m", "a", "b", "--n", "2", "--temperature", "1")
    headers = [line for line in shell.out.splitlines() if line.startswith("==>")]
    assert headers == [f"==> prompt {p}, answer {a} <==" for p in (1, 2) for a in (1, 2)]


def test_json_is_the_last_line_of_stdout(shell: Shell) -> None:
    shell("generate", "m", "Hi", "--json", "--spec-method", "ngram")
    document = shell.json
    assert len(shell.out.splitlines()) == 1
    assert document["results"][0]["outputs"][0]["text"] == ANSWER
    assert document["method"] == "ngram"
    assert document["stats"]["mean_acceptance_length"] == 3.0
    assert document["errors"] == []


def test_bad_lines_are_named_and_the_others_answered(shell: Shell, tmp_path: Path) -> None:
    lines = [
        b'{"prompt": "first"}',
        b'{"prompt": "caf\xe9"}',
        b"{broken",
        b'{"text": "no key"}',
        b'{"prompt": ""}',
        b"",
        b'{"messages": [{"role": "user", "content": "seventh"}]}',
        b'{"turns": ["eighth", "not this one"]}',
        b"[1]",
        b'{"messages": [{"content": "no role"}]}',
        b'{"messages": [{"role": "jester", "content": "no such role"}]}',
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b"\n".join(lines))
    assert shell("generate", "m", "--prompts-file", str(file)) == 2
    assert shell.llm.requests == ["<user>first", "<user>seventh", "<user>eighth"]
    errors = [line for line in shell.err.splitlines() if line.startswith("error:")]
    assert [int(e.split(":")[1].removeprefix(" line ")) for e in errors] == [2, 3, 4, 5, 9, 10, 11]
    assert "is not UTF-8" in errors[0]
    assert shell.out.count(ANSWER) == 3


def test_prompt_longer_than_the_context_fails_alone(shell: Shell) -> None:
    assert shell("generate", "m", "short", "x" * CONTEXT, "--json") == 2
    assert shell.llm.requests == ["<user>short"]
    assert [e["where"] for e in shell.json["errors"]] == ["prompt 2"]
    assert "hint: shorten it" in shell.err


def test_request_that_fails_in_the_engine_is_named(shell: Shell) -> None:
    shell.make = partial(FakeLLM, failing="poison")
    assert shell("generate", "m", "fine", "poison") == 2
    assert "error: prompt 2: NaN logits" in shell.err
    assert shell.out.count(ANSWER) == 1


def test_only_bad_lines_load_no_model(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text("{\n")
    assert shell("generate", "m", "--prompts-file", str(file)) == 2
    assert shell.engines == []


def test_failures_alone_are_a_json_document_too(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text("{\n")
    assert shell("generate", "m", "--prompts-file", str(file), "--json") == 2
    assert [e["where"] for e in shell.json["errors"]] == ["line 1"]
    assert shell.json["results"] == []
    assert shell.json["model"] == "m"


def test_what_is_finished_survives_ctrl_c(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_text("one\ntwo\nthree\n")
    shell.make = partial(FakeLLM, interrupt_at=3)
    assert shell("generate", "m", "--prompts-file", str(file)) == 130
    assert shell.out == f"==> line 1 <==\n{ANSWER}\n==> line 2 <==\n{ANSWER}\n"
    assert "error: line 3: interrupted" in shell.err
    assert shell("generate", "m", "--prompts-file", str(file), "--json") == 130
    assert [result["where"] for result in shell.json["results"]] == ["line 1", "line 2"]
    assert shell.json["errors"] == [{"where": "line 3", "message": "interrupted", "hint": None}]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "holds no prompt"), (b" \n\n", "holds no prompt"), (b"a\0b", "is not a text file")],
)
def test_a_file_without_prompts_is_refused(
    shell: Shell, tmp_path: Path, content: bytes, message: str
) -> None:
    file = tmp_path / "p.txt"
    file.write_bytes(content)
    assert shell("generate", "m", "--prompts-file", str(file)) == 2
    assert message in shell.err
    assert shell.engines == []


def test_a_compressed_file_is_read_as_prepare_reads_it(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"prompt": "packed"}\n'))
    assert shell("generate", "m", "--prompts-file", str(file)) == 0
    assert shell.llm.requests == ["<user>packed"]
    file.write_bytes(b"\x1f\x8b broken")
    assert shell("generate", "m", "--prompts-file", str(file)) == 2
    assert "cannot read --prompts-file" in shell.err


def test_only_the_first_of_many_bad_lines_are_shown(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_bytes(b"caf\xe9\n" * 100)
    assert shell("generate", "m", "--prompts-file", str(file)) == 2
    assert shell.err.count("is not UTF-8") == 20
    assert "and 80 more" in shell.err


def test_stdin_is_read_as_a_prompts_file(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "﻿" + json.dumps({"prompt": "piped"}) + "\r\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert shell("generate", "m", "--prompts-file", "-") == 0
    assert shell.llm.requests == ["<user>piped"]


def test_text_file_has_one_prompt_per_line(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_text("a\n\nb\n")
    assert shell("generate", "m", "--prompts-file", str(file), "--raw") == 0
    assert shell.llm.requests == ["a", "b"]


def test_messages_need_a_template(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "a"}]}\n{"prompt": "b"}\n')
    assert shell("generate", "m", "--prompts-file", str(file), "--raw") == 2
    assert "error: line 1: messages need a chat template" in shell.err
    assert shell.llm.requests == ["b"]


def test_a_single_prompt_streams_into_a_pipe_too(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    write, flush = sys.stdout.write, sys.stdout.flush
    monkeypatch.setattr(sys.stdout, "write", lambda text: (flushed.append(text), write(text))[1])
    monkeypatch.setattr(sys.stdout, "flush", lambda: (flushed.append("FLUSH"), flush())[1])
    assert shell("generate", "m", "Hi") == 0
    assert shell.llm.num_closed == 1
    assert shell.out == f"{ANSWER}\n"
    assert flushed[:4] == [ANSWER[0], "FLUSH", ANSWER[1], "FLUSH"]


def test_logprobs_of_impossible_tokens_are_still_json() -> None:
    possible, impossible = Logprob(-0.5, 1, "a"), Logprob(float("-inf"), 2, "b")
    answer = CompletionOutput(0, "a", [1], "stop", logprobs=[{1: possible, 2: impossible}])
    run = BatchResult(
        [NamedPrompt("prompt 1", "Hi")], [RequestOutput("0", None, [1], [answer], True)], 1.0
    )
    llm = FakeLLM("m", EngineConfig(), None)
    text = json.dumps(document("m", llm, run, []), allow_nan=False)
    assert json.loads(text)["results"][0]["outputs"][0]["logprobs"][0]["2"]["logprob"] == -9999.0
