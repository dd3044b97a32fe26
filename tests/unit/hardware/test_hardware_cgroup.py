"""Control groups, v1, v2 and inside a container. The trees are synthetic."""

import pytest

from fulltilt.hardware import read_cpu_quota_cores, read_memory_limit_bytes, read_memory_room_bytes, read_oom_kills

V2_MOUNT = "35 25 0:30 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)
CONTAINER_MOUNT = "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
GIB = 2**30
V1_UNLIMITED = "9223372036854771712\n"


@pytest.fixture
def plant_groups(plant):
    """Plants the groups of this process, its mounts, and files below /sys/fs/cgroup."""

    def write(groups, mounts, files):
        named = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
        return plant({"proc/self/cgroup": groups, "proc/self/mountinfo": mounts} | named)

    return write


@pytest.mark.parametrize(
    ("groups", "mounts", "files", "limit_bytes", "quota_cores", "oom_kills"),
    [
        pytest.param(
            "0::/user.slice/job.scope\n",
            V2_MOUNT,
            {
                "user.slice/job.scope/memory.max": "max\n",
                "user.slice/memory.max": f"{3 * GIB}\n",
                "user.slice/job.scope/cpu.max": "400000 100000\n",
                "user.slice/cpu.max": "150000 100000\n",
                "user.slice/job.scope/memory.events": "low 0\nhigh 0\nmax 7\noom 2\noom_kill 1\n",
            },
            *(3 * GIB, 1.5, 1),
            id="v2 takes the smallest limit of all levels",
        ),
        pytest.param(
            "4:memory:/batch/job7\n3:cpu,cpuacct:/batch\n0::/\n",
            V1_MOUNTS,
            {
                "memory/batch/job7/memory.limit_in_bytes": f"{2 * GIB}\n",
                "memory/memory.limit_in_bytes": V1_UNLIMITED,
                "memory/batch/job7/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n",
                "cpu,cpuacct/batch/cpu.cfs_quota_us": "300000\n",
                "cpu,cpuacct/batch/cpu.cfs_period_us": "100000\n",
            },
            *(2 * GIB, 3.0, 4),
            id="v1 reads each controller at its own mount",
        ),
        pytest.param(
            "4:memory:/\n3:cpu,cpuacct:/\n",
            V1_MOUNTS,
            {
                "memory/memory.limit_in_bytes": V1_UNLIMITED,
                "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            *(None, None, None),
            id="v1 without limits is none and no huge number",
        ),
        pytest.param(
            "4:memory:/docker/abc\n",
            CONTAINER_MOUNT,
            {"memory/memory.limit_in_bytes": f"{GIB}\n"},
            *(GIB, None, None),
            id="a container that sees only its part of the tree",
        ),
        pytest.param(
            "0::/../../outside\n",
            V2_MOUNT,
            {"memory.max": "12345678\n", "../../outside/memory.max": "1\n"},
            *(12345678, None, None),
            id="a path cannot lead out of the mount",
        ),
        pytest.param(
            "garbage\n0::/a\n::\n",
            "garbage\n" + V2_MOUNT,
            {"a/memory.max": "", "a/cpu.max": "max\n"},
            *(None, None, None),
            id="broken files are no limit",
        ),
        pytest.param("", "", {}, *(None, None, None), id="no groups at all"),
    ],
)
def test_limits(plant_groups, groups, mounts, files, limit_bytes, quota_cores, oom_kills):
    root = plant_groups(groups, mounts, files)
    found = (read_memory_limit_bytes(root), read_cpu_quota_cores(root), read_oom_kills(root))
    assert found == (limit_bytes, quota_cores, oom_kills)
    assert read_memory_room_bytes(root) == limit_bytes, "nothing is used"


def test_oom_kills_fall_back_to_the_whole_machine(recorded):
    assert read_oom_kills(recorded) == 0


@pytest.mark.parametrize(
    ("groups", "mounts", "files", "room_bytes"),
    [
        pytest.param(
            "0::/user.slice/job.scope\n",
            V2_MOUNT,
            {
                "user.slice/job.scope/memory.max": f"{8 * GIB}\n",
                "user.slice/job.scope/memory.current": f"{1 * GIB}\n",
                "user.slice/memory.max": f"{6 * GIB}\n",
                "user.slice/memory.current": f"{5 * GIB}\n",
                "user.slice/memory.stat": f"anon {3 * GIB}\ninactive_file {2 * GIB}\nactive_file 0\n",
            },
            3 * GIB,
            id="the tightest group counts, with idle pages of files as room",
        ),
        pytest.param(
            "4:memory:/batch/job7\n",
            V1_MOUNTS,
            {
                "memory/batch/job7/memory.limit_in_bytes": f"{2 * GIB}\n",
                "memory/batch/job7/memory.usage_in_bytes": f"{3 * GIB // 2}\n",
                "memory/batch/job7/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
            },
            3 * GIB // 2,
            id="v1",
        ),
        pytest.param(
            "0::/a\n",
            V2_MOUNT,
            {"a/memory.max": f"{GIB}\n", "a/memory.current": f"{GIB + 4096}\n"},
            0,
            id="a group past its limit",
        ),
    ],
)
def test_room(plant_groups, groups, mounts, files, room_bytes):
    assert read_memory_room_bytes(plant_groups(groups, mounts, files)) == room_bytes
