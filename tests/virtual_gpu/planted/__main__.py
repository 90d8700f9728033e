"""`./run planted`: plant faults one after another in a copy of the tree; the tests must notice each of them."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from fnmatch import fnmatch
from pathlib import Path
from queue import SimpleQueue

from virtual_gpu.planted.faults import Fault, load_faults, stale
from virtual_gpu.planted.trial import Outcome, Tree


def choose(faults: list[Fault], patterns: list[str], part: str) -> list[Fault]:
    """Return the faults that a name or pattern names (all, for none), and of them part i of n."""
    number, count = (int(figure) for figure in part.split("/"))
    if not 1 <= number <= count:
        raise SystemExit(f"--part {part}: must be i/n with 1 <= i <= n")
    unknown = [p for p in patterns if not any(fnmatch(fault.name, p) for fault in faults)]
    if unknown:
        raise SystemExit(f"no planted fault is called {', '.join(unknown)}; ./run planted --list names them")
    chosen = [fault for fault in faults if not patterns or any(fnmatch(fault.name, p) for p in patterns)]
    return chosen[number - 1 :: count]


def attempt_all(faults: list[Fault], trees: list[Tree]) -> Iterator[tuple[Fault, Outcome]]:
    """Yield each fault with its outcome as it is known; a tree takes one at a time."""
    idle: SimpleQueue[Tree] = SimpleQueue()
    for tree in trees:
        idle.put(tree)

    def attempt(fault: Fault) -> Outcome:
        tree = idle.get()
        try:
            return tree.attempt(fault)
        finally:
            idle.put(tree)

    with ThreadPoolExecutor(len(trees)) as pool:
        futures = {pool.submit(attempt, fault): fault for fault in faults}
        for future in as_completed(futures):
            yield futures[future], future.result()


def run_clean(tree: Tree, faults: list[Fault]) -> None:
    """Run all the faults' tests on the tree as it is. SystemExit where they fail: a trial would say nothing."""
    start = time.monotonic()
    code, output = tree.run(sorted({test for fault in faults for test in fault.tests}), 3600)
    if code:
        print(output)
        raise SystemExit("the tests fail without any fault planted")
    print(f"{'clean':11}{time.monotonic() - start:7.1f} s  all chosen tests pass without a fault", flush=True)


def run(faults: list[Fault], jobs: int, *, is_first_clean: bool, verbose: bool) -> int:
    """Attempt the faults and print a line each; return how many the tests did not catch."""
    start, missed = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="planted-") as folder, ExitStack() as held:
        places = [Path(folder) / f"tree{number}" for number in range(min(jobs, len(faults)))]
        trees = [held.enter_context(Tree(place, Path(folder) / "cache")) for place in places]
        if is_first_clean:
            run_clean(trees[0], faults)
        for fault, outcome in attempt_all(faults, trees):
            print(f"{outcome.verdict:11}{outcome.seconds:7.1f} s  {fault.name}: {fault.what}", flush=True)
            if outcome.detail and (verbose or outcome.verdict == "broken"):
                print(f"{'':22}{outcome.detail}", flush=True)
            if outcome.verdict != "caught":
                missed.append(fault)
    print(f"{len(faults) - len(missed)} of {len(faults)} planted faults caught in {time.monotonic() - start:.0f} s")
    if missed:
        print("not caught, or broken: " + " ".join(fault.name for fault in missed))
    return len(missed)


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 if every chosen fault is caught."""
    parser = argparse.ArgumentParser(prog="./run planted", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to plant, with * and ?; without any, all")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="every Nth of them, from the Ith on")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time, each in a copy of its own")
    parser.add_argument("--list", action="store_true", help="only name them")
    parser.add_argument("--check", action="store_true", help="only say which texts are not there exactly once")
    parser.add_argument("--skip-clean", action="store_true", help="trust that the tests pass without a fault")
    parser.add_argument("--verbose", action="store_true", help="with what the tests said")
    args = parser.parse_args(argv)
    faults = choose(load_faults(), args.names, args.part)
    old = stale(faults)
    print(
        "\n".join([f"{f.name:44}{f.what}" for f in faults] if args.list else old), end="\n" if args.list or old else ""
    )
    if args.list or args.check or old:
        return int(bool(old))
    missed = run(faults, max(1, args.jobs), is_first_clean=not args.skip_clean, verbose=args.verbose)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
