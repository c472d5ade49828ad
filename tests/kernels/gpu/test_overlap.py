"""Claim: kernels that begin early keep the rules of kernels/gpu/overlap.py.

Read from their source, since results do not show it: a kernel that reads or writes too early is
wrong only where the one ahead of it happens to be slower.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import peagle

from .overlap_source import PACKAGE, SIGNAL, Early, Sources, before_wait, early, says_overlapping

FOLDER = Path(peagle.__file__).parent / "kernels" / "gpu"
# What a kernel may load before it waits: written two kernels ago or earlier, or never.
ROW_PLACES = {"positions_ptr", "slots_ptr", "cos_ptr", "sin_ptr"}
EARLY_READS = {
    "qkv._rotate_and_write": ROW_PLACES,
    "qkv._qkv_to_cache": ROW_PLACES,
    "attention._attend": {
        *("starts_ptr", "ends_ptr", "tables_ptr", "block_tables_ptr", "ancestors_ptr"),
        "row_starts_ptr",
    },
    "fp8._quantize_normed_row": {"norm_weight"},
}
EARLY_FETCHES = {"weight_ptr", "keys_ptr", "values_ptr"}  # to the cache alone

SOURCES = Sources({path.stem: path.read_text() for path in sorted(FOLDER.glob("*.py"))})
every_kernel = pytest.mark.parametrize("name", SOURCES.kernels)


@every_kernel
def test_a_kernel_neither_writes_nor_signals_before_it_waits(name: str) -> None:
    assert early(SOURCES, SOURCES.kernels[name]).others == set()


@every_kernel
def test_a_kernel_reads_only_what_is_old_before_it_waits(name: str) -> None:
    found = early(SOURCES, SOURCES.kernels[name])
    assert found.reads <= EARLY_READS.get(name, set())
    assert found.fetches <= EARLY_FETCHES


@every_kernel
def test_every_launch_says_that_the_kernel_may_begin_early(name: str) -> None:
    launches = list(SOURCES.launches(SOURCES.kernels[name]))
    assert launches
    assert all(says_overlapping(*launch) for launch in launches)


def test_wait_waits_before_it_signals() -> None:
    wait = SOURCES.scopes["overlap"]["wait"].function
    assert [ast.unparse(statement) for statement in wait.body] == ["gdc_wait()", f"{SIGNAL}()"]


def test_the_list_names_kernels_that_are_there() -> None:
    assert set(EARLY_READS) <= set(SOURCES.kernels)


KEEPS_THE_RULES = """
@triton.jit
def look_up(table, place):
    return tl.load(table + place)

@triton.jit
def kernel(x_ptr, slots_ptr, out_ptr, size, ROWS: tl.constexpr, OVERLAPS: tl.constexpr):
    row = tl.program_id(0) * ROWS
    x_rows = x_ptr + row * size
    slot = look_up(slots_ptr, row)
    if OVERLAPS:
        wait()
    tl.store(out_ptr + slot, tl.load(x_rows))

def launch(x, slots, out):
    kernel[(1,)](x, slots, out, 1, ROWS=1, **overlapping())
"""
WAIT = "        wait()\n"
BREAKS: dict[str, tuple[str, str]] = {
    "no wait": (WAIT, "        pass\n"),
    "a wait of some programs": (WAIT, "        if row > 0:\n            wait()\n"),
    "a store before it": (WAIT, f"        tl.store(out_ptr, 0)\n{WAIT}"),
    "a store in a helper": ("    return", "    tl.store(table, 0)\n    return"),
    "an end before it": ("    slot =", "    if row > size:\n        return\n    slot ="),
    "a signal before it": ("    slot =", f"    {SIGNAL}()\n    slot ="),
    "a load of new rows": ("    if OVERLAPS", "    x = tl.load(x_rows)\n    if OVERLAPS"),
    "a helper's load of new rows": ("look_up(slots_ptr", "look_up(x_rows"),
    "a launch that does not say it": (", **overlapping()", ", OVERLAPS=True"),
}


def keeps_the_rules(text: str) -> bool:
    imports = f"from {PACKAGE}overlap import wait"
    overlap = (FOLDER / "overlap.py").read_text()
    sources = Sources({"overlap": overlap, "own": imports + text})
    kernel = sources.kernels["own.kernel"]
    if before_wait(kernel) is None:
        return False
    found, launches = early(sources, kernel), list(sources.launches(kernel))
    is_told = bool(launches) and all(says_overlapping(*launch) for launch in launches)
    return found == Early(reads={"slots_ptr"}) and is_told


def test_a_kernel_that_keeps_the_rules_is_let_through() -> None:
    assert keeps_the_rules(KEEPS_THE_RULES)


@pytest.mark.parametrize("what", BREAKS)
def test_a_broken_rule_is_found(what: str) -> None:
    old, new = BREAKS[what]
    assert KEEPS_THE_RULES.count(old) == 1
    assert not keeps_the_rules(KEEPS_THE_RULES.replace(old, new))
