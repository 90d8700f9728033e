"""The planted faults themselves: each is where its text says, and the trial tells what the tests noticed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from virtual_gpu.planted.__main__ import choose, main
from virtual_gpu.planted.faults import ROOT, load_faults, stale
from virtual_gpu.planted.trial import Tree, judge

FAULTS = load_faults()
QUICK = ["event-handed-out-while-in-use", "graph-that-keeps-what-a-step-uploaded"]


def test_every_faults_text_is_in_its_file_exactly_once():
    assert not stale(FAULTS)


def test_there_are_faults_of_kernels_and_of_host_code():
    kinds = [fault.file.split("/")[0] for fault in FAULTS]
    assert kinds.count("cudasrc") >= 40
    assert kinds.count("service") >= 20


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_changes_something_and_names_tests_that_are_there(fault):
    assert fault.text != fault.replacement
    for test in fault.tests:
        path, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text()


def test_the_quickest_faults_are_caught_and_the_checkout_stays_as_it_is(tmp_path):
    """And a change that no test can see is not."""
    quick = choose(FAULTS, QUICK, "1/1")
    with Tree(tmp_path / "tree", tmp_path / "cache") as tree:
        for fault in quick:
            before = (ROOT / fault.file).read_text()
            assert tree.attempt(fault).verdict == "caught"
            assert (ROOT / fault.file).read_text() == (tree.root / fault.file).read_text() == before
        harmless = replace(quick[0], replacement=f"{quick[0].text}  # as it was")
        assert tree.attempt(harmless).verdict == "not caught"


def test_a_text_that_is_gone_is_told_by_the_faults_name(tmp_path, capsys):
    gone = replace(FAULTS[0], text="no such text")
    assert stale([gone]) == [f"{gone.name}: found 0 times in {gone.file}: 'no such text'"]
    assert main(["--check"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("code", "output", "verdict"),
    [
        (0, "", "not caught"),
        (1, "E   assert 1 == 2", "caught"),
        (1, "attend.cu does not compile with -DX", "broken"),
        (4, "no such test", "broken"),
        (-9, "", "broken"),
    ],
)
def test_a_trial_is_judged_by_what_the_tests_said(code, output, verdict):
    assert judge(code, output, 1.0).verdict == verdict


def test_parts_are_disjoint_and_together_all():
    parts = [choose(FAULTS, [], f"{number}/4") for number in range(1, 5)]
    assert sorted(fault.name for part in parts for fault in part) == sorted(fault.name for fault in FAULTS)
    with pytest.raises(SystemExit, match="--part 5/4"):
        choose(FAULTS, [], "5/4")
    with pytest.raises(SystemExit, match="no planted fault"):
        choose(FAULTS, ["attend-*", "nothing"], "1/1")
