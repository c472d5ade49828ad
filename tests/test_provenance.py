"""Result files say what they came from."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from peagle.log import setup_logging
from peagle.provenance import git_state, provenance


def test_record_is_json_and_names_what_a_figure_depends_on() -> None:
    record = json.loads(json.dumps(provenance()))
    assert record["hardware"]["cpu"]
    assert record["hardware"]["memory_gib"] > 0
    assert {"peagle", "python", "torch", "transformers"} <= record["versions"].keys()


def test_folder_outside_a_checkout_has_no_commit(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None


def test_log_goes_to_stderr_at_the_level_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEAGLE_LOG_LEVEL", "warning")
    setup_logging()
    logging.getLogger("peagle.engine").info("quiet")
    setup_logging(1)
    logging.getLogger("peagle.engine").info("loud")
    out, err = capsys.readouterr()
    assert out == ""
    assert "quiet" not in err
    assert "peagle.engine: loud" in err
