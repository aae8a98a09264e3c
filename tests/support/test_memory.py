"""What memory is free: by the machine, and by the groups of processes that have limits."""

import pytest

from foldwise.support import memory

GB = 10**9


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Makes folders of groups as Linux has them, and says which of them this process is in."""
    monkeypatch.setattr(memory, "_GROUPS", tmp_path)
    monkeypatch.setattr(memory, "_OWN_GROUPS", tmp_path / "own")

    def made(own, files):
        (tmp_path / "own").write_text(own)
        for name, content in files.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{content}\n")

    return made


CASES = {
    "a container, which sees itself as the outermost": (
        "0::/\n",
        {"memory.max": GB, "memory.current": GB // 4},
        GB - GB // 4,
    ),
    "a job of Slurm, within a group of its own": (
        "0::/system.slice/slurm/job_7/step_0\n",
        {
            "memory.max": "max",
            "memory.current": 3 * GB,
            "system.slice/slurm/job_7/memory.max": GB,
            "system.slice/slurm/job_7/memory.current": GB // 2,
            "system.slice/slurm/job_7/step_0/memory.max": "max",
            "system.slice/slurm/job_7/step_0/memory.current": GB // 2,
        },
        GB - GB // 2,
    ),
    "the older version": (
        "5:cpu,cpuacct:/\n4:devices,memory:/job_7\n0::/\n",
        {
            "memory/memory.limit_in_bytes": 2**63 - 4096,
            "memory/memory.usage_in_bytes": 3 * GB,
            "memory/job_7/memory.limit_in_bytes": GB,
            "memory/job_7/memory.usage_in_bytes": GB // 8,
        },
        GB - GB // 8,
    ),
    "the older version in a container, which has another name outside": (
        "4:memory:/docker/0123\n",
        {"memory/memory.limit_in_bytes": GB, "memory/memory.usage_in_bytes": GB // 8},
        GB - GB // 8,
    ),
    "more in use than there may be": ("0::/\n", {"memory.max": GB, "memory.current": 2 * GB}, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_the_limit_of_the_container_is_seen(case, groups):
    own, files, free = CASES[case]
    groups(own, files)
    assert memory.free_memory() == free


@pytest.mark.parametrize(
    ("files", "line"),
    [(("memory.max", "memory.current"), "inactive_file"),
     (("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"), "total_inactive_file")],
)  # fmt: skip
def test_copies_of_files_make_room(files, line, groups):
    """A container that has read or written large files has room for all that."""
    limit, used = files
    stat = used.replace(used.split("/")[-1], "memory.stat")
    groups("0::/\n", {limit: GB, used: GB - 5, stat: f"anon 9\n{line} {GB // 2}"})
    assert memory.free_memory() == GB // 2 + 5


def test_without_limits_it_is_the_machines(groups):
    groups("0::/\n", {"memory.max": "max", "memory.current": GB})
    of_machine = memory._count(memory.Path("/proc/meminfo"), "MemAvailable:")
    if of_machine is None:
        assert memory.free_memory() is None
    else:
        assert memory.free_memory() == pytest.approx(1024 * of_machine, rel=0.2)
