"""The oldest versions that pyproject.toml allows, as constraints for pip: numpy==2.0 of numpy>=2.0.

Of what users need, dependencies and optional ones alike; the tools of tests, types, benches and
documents may be as new as they come.
"""

import re
import sys
import tomllib
from pathlib import Path

TOOLS = ("all", "bench", "dev", "docs")
BOUND = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(\[[^\]]*\])?>=(?P<version>[0-9.]+)(,<[0-9.]+)?")


def oldest(project: dict) -> list[str]:
    """One ``name==version`` for each package that users need, without foldwise's own extras."""
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"]]
    wanted += [one for extra, names in extras.items() if extra not in TOOLS for one in names]
    lines = []
    for one in wanted:
        if one.startswith(project["name"] + "["):
            continue
        bound = BOUND.fullmatch(one.replace(" ", ""))
        if bound is None:
            sys.exit(f"pyproject.toml: a dependency must be name>=version, got {one}; bound it")
        lines.append(f"{bound['name']}=={bound['version']}")
    return lines


if __name__ == "__main__":
    with Path(__file__).parents[1].joinpath("pyproject.toml").open("rb") as file:
        print(*oldest(tomllib.load(file)["project"]), sep="\n")
