"""The peak of a process beside what was planned for its run, which it may exceed by 15 %.

Each case of ``tests/peak.py`` in a process of its own: leave-one-out by weights, chains whose draws
are stored, running sums, scores by row, cells that are integrated out, chains on what groups share.

    python bench/memory.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import peak  # noqa: E402

MOST_RATIO = 1.15


def main() -> None:
    over = []
    for case in peak.CASES:
        ratio, said = peak.measured(case)
        print(f"{case:14s} plan, peak, ratio {said}", flush=True)
        if ratio > MOST_RATIO:
            over.append(case)
    sys.exit(f"over the plan: {', '.join(over)}" if over else 0)


if __name__ == "__main__":
    main()
