"""The page that `make test-compat` writes, from reports as pytest writes them."""

from __future__ import annotations

import textwrap

from tools.compat import FAILED, NOT_APPLICABLE, PASSED, Result, failures, page, read

REPORT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="pytest">
  <testcase classname="tests.vllm.test_core" name="test_hit[llama]" file="tests/vllm/test_core.py" line="1" />
  <testcase classname="tests.vllm.test_core.TestFaults" name="test_retry" file="tests/vllm/test_core.py" line="2">
    <skipped type="pytest.skip" message="only block errors&#10;before 0.30">core.py:3: only</skipped></testcase>
  <testcase classname="tests.vllm.test_core" name="test_xfail" file="tests/vllm/test_core.py" line="3">
    <skipped type="pytest.xfail" message="known" /></testcase>
  <testcase classname="tests.vllm.test_core" name="test_end" file="tests/vllm/test_core.py" line="4" />
  <testcase classname="tests.vllm.test_core" name="test_end" file="tests/vllm/test_core.py" line="4">
    <error message="failed on teardown">...</error></testcase>
  <testcase classname="tests.vllm.test_core" name="test_load" file="tests/vllm/test_core.py" line="5">
    <failure message="assert">...</failure></testcase>
  <testcase classname="" name="tests.vllm.test_new"><error message="collection failure">...</error></testcase>
</testsuite></testsuites>
"""


def test_a_report_is_read_by_the_names_one_gives_to_pytest() -> None:
    assert read(REPORT) == {
        "tests/vllm/test_core.py::test_hit[llama]": Result(PASSED),
        "tests/vllm/test_core.py::TestFaults::test_retry": Result(NOT_APPLICABLE, "only block errors before 0.30"),
        "tests/vllm/test_core.py::test_xfail": Result(FAILED),
        "tests/vllm/test_core.py::test_end": Result(FAILED),
        "tests/vllm/test_core.py::test_load": Result(FAILED),
        "tests/vllm/test_new.py": Result(FAILED),
    }


def test_the_page_has_a_row_for_every_case_and_a_note_for_every_reason() -> None:
    old = Result(NOT_APPLICABLE, "only block errors")
    results = {
        "0.29.0": {"t.py::a": Result(PASSED), "t.py::b": old, "t.py::c[x|y]": old},
        "0.30.0": {"t.py::a": Result(PASSED), "t.py::b": Result(NOT_APPLICABLE, "")},
        "0.31.0": {"t.py::a": Result(FAILED), "t.py::b": Result(PASSED), "t.py::c[x|y]": Result(PASSED)},
    }
    assert page(results, "Python 3.11.7, torch 2.13.0+cpu") == textwrap.dedent("""\
        # Tested releases of vLLM

        `make test-compat` wrote this page: Python 3.11.7, torch 2.13.0+cpu, on a CPU.
        Only vLLM differs from release to release.

        | case | 0.29.0 | 0.30.0 | 0.31.0 |
        | --- | --- | --- | --- |
        | `t.py::a` | passed | passed | **failed** |
        | `t.py::b` | not applicable (1) | not applicable (2) | passed |
        | `t.py::c[x\\|y]` | not applicable (1) | **not run** | passed |

        Not applicable:

        1. only block errors
        2. no reason given
        """)
    assert list(failures(results)) == [
        "vLLM 0.30.0: t.py::c[x|y]: not run",
        "vLLM 0.31.0: t.py::a: failed",
    ]


def test_a_release_on_which_nothing_passed_has_failed() -> None:
    skipped = {"a": Result(NOT_APPLICABLE, "no vLLM")}
    assert list(failures({"0.27.1": skipped})) == ["vLLM 0.27.1: no case passed"]
    assert list(failures({"0.27.1": {}, "0.28.0": {}})) == [
        "vLLM 0.27.1: no case passed",
        "vLLM 0.28.0: no case passed",
    ]


def test_no_reason_no_notes() -> None:
    assert page({"0.32.0": {"a": Result(PASSED)}}, "Python 3.11.7").endswith("| `a` | passed |\n")
