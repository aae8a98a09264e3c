"""Saved results that are damaged, and saving that is killed: nothing wrong is ever read.

Loads 2,000 damaged copies of a saved result in a process of their own, half of them without a seal,
as older versions wrote them: each must give a clear error or the right numbers, in 1 GB and 20 s of
the processor (and two minutes by the clock, beside other work).
Then kills a process that saves over an existing file, with SIGKILL at 100 moments: the file must be
the one or the other of the two results, and the next save must remove what is left.

    python bench/files.py [--damaged 2000] [--kills 100] [--seed 0]
"""

import argparse
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path.insert(0, str(TESTS))
MOST_BYTES, MOST_SECONDS, LONGEST_WAIT = 2**30, 20, 120


def results(folder: Path):
    """Two results of one model, by chains, and their files."""
    import problems
    from stored import Case

    case = Case.of(problems.regression())
    paths = []
    for draws in (60, 80):
        paths.append(folder / f"draws_{draws}.nc")
        case.run(draws=draws).save(paths[-1])
    return paths


def fuzz(path: Path, first: int, last: int, seed: int) -> None:
    """Load damaged copies ``first`` to ``last``, one outcome a line."""
    from damage import KINDS, damaged, outcome

    from foldwise.results import files, sealing

    raw, result = path.read_bytes(), files.load(path)
    copy = path.with_name("damaged.nc")
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print("begun", flush=True)
    for k in range(first, last):
        rng = random.Random(f"{seed} {k}")
        whole = raw if k % 2 else raw[: -sealing._SEAL_BYTES]
        copy.write_bytes(damaged(whole, KINDS[k // 2 % len(KINDS)], rng))
        signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
        signal.alarm(LONGEST_WAIT)
        said = outcome(copy, result)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        assert peak - used < MOST_BYTES, f"copy {k} took {(peak - used) / 1e9:.1f} GB"
        print(k, "sealed" if k % 2 else "bare", said, flush=True)


def fuzz_all(path: Path, count: int, seed: int) -> int:
    """Outcomes of all damaged copies; a process that ends is one that failed, and is gone on from.

    Returns the number of failures.
    """
    found: Counter[str] = Counter()
    failures, first = 0, 0
    while first < count:
        command = [sys.executable, __file__, "--fuzz", str(path), str(first), str(count), str(seed)]
        done = subprocess.run(command, capture_output=True, text=True)
        lines = done.stdout.split("\n")[1:-1]
        for line in lines:
            found[" ".join(line.split()[1:])] += 1
        first += len(lines)
        if first < count:
            failures += 1
            print(f"copy {first} failed, exit code {done.returncode}\n{done.stderr[-2000:]}")
            first += 1
    print(f"damaged files: {dict(sorted(found.items()))}, failures {failures}")
    return failures


SAVES = """
import sys
import foldwise as fw
one, two = fw.load(sys.argv[1]), fw.load(sys.argv[2])
print("begun", flush=True)
while True:
    one.save(sys.argv[3])
    two.save(sys.argv[3])
"""


def kill_all(paths: list[Path], count: int, seed: int) -> int:
    """Number of kills after which the file was neither of the two."""
    from stored import content

    import foldwise as fw

    rng, target = random.Random(seed), paths[0].parent / "kills" / "result.nc"
    target.parent.mkdir()
    known = {content(path) for path in paths}
    fw.load(paths[0]).save(target)
    failures, left, seen = 0, 0, Counter()
    for _ in range(count):
        command = [sys.executable, "-c", SAVES, *map(str, paths), str(target)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        process.stdout.read(5)
        time.sleep(rng.random())
        process.kill()
        process.communicate()
        partial = [p for p in target.parent.iterdir() if p != target]
        left += len(partial)
        fw.load(target)
        seen[content(target)] += 1
        failures += content(target) not in known or len(partial) > 1
    fw.load(paths[0]).save(target)
    failures += list(target.parent.iterdir()) != [target]
    print(
        f"kills: {count}, the one or the other file {dict(seen)}, partial files left {left} and "
        f"removed by the next save, failures {failures}"
    )
    return failures


def main() -> None:
    if sys.argv[1:2] == ["--fuzz"]:
        path, first, last, seed = sys.argv[2:]
        fuzz(Path(path), int(first), int(last), int(seed))
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--damaged", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = results(Path(folder))
        began = time.perf_counter()
        failures = fuzz_all(paths[0], options.damaged, options.seed)
        print(f"{time.perf_counter() - began:.0f} s")
        failures += kill_all(paths, options.kills, options.seed)
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
