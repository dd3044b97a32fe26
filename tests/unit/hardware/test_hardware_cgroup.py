"""Control groups, v1, v2 and inside a container. The trees are synthetic."""

from __future__ import annotations

from fulltilt.hardware import (
    count_usable_cores,
    read_cpu_quota_cores,
    read_memory_limit_bytes,
    read_memory_room_bytes,
    read_oom_kills,
)

V2_MOUNT = "35 25 0:30 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)
GIB = 2**30


def test_v2_takes_the_smallest_limit_of_all_levels(plant):
    root = plant(
        {
            "proc/self/cgroup": "0::/user.slice/job.scope\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/user.slice/job.scope/memory.max": "max\n",
            "sys/fs/cgroup/user.slice/memory.max": f"{3 * GIB}\n",
            "sys/fs/cgroup/user.slice/job.scope/cpu.max": "400000 100000\n",
            "sys/fs/cgroup/user.slice/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/user.slice/job.scope/memory.events": "low 0\nhigh 0\nmax 7\noom 2\noom_kill 1\n",
        }
    )
    assert read_memory_limit_bytes(root) == 3 * GIB
    assert read_cpu_quota_cores(root) == 1.5
    assert read_oom_kills(root) == 1


def test_v1_reads_each_controller_at_its_own_mount(plant):
    root = plant(
        {
            "proc/self/cgroup": "4:memory:/batch/job7\n3:cpu,cpuacct:/batch\n0::/\n",
            "proc/self/mountinfo": V1_MOUNTS,
            "sys/fs/cgroup/memory/batch/job7/memory.limit_in_bytes": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/batch/job7/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n",
            "sys/fs/cgroup/cpu,cpuacct/batch/cpu.cfs_quota_us": "300000\n",
            "sys/fs/cgroup/cpu,cpuacct/batch/cpu.cfs_period_us": "100000\n",
        }
    )
    assert read_memory_limit_bytes(root) == 2 * GIB
    assert read_cpu_quota_cores(root) == 3.0
    assert read_oom_kills(root) == 4


def test_v1_without_limits_gives_none_and_not_a_huge_number(plant):
    root = plant(
        {
            "proc/self/cgroup": "4:memory:/\n3:cpu,cpuacct:/\n",
            "proc/self/mountinfo": V1_MOUNTS,
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        }
    )
    assert read_memory_limit_bytes(root) is None
    assert read_cpu_quota_cores(root) is None


def test_container_that_sees_only_its_part_of_the_tree(plant):
    root = plant(
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n",
            "proc/self/mountinfo": "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n",
        }
    )
    assert read_memory_limit_bytes(root) == GIB


def test_group_path_cannot_lead_out_of_the_mount(plant):
    root = plant(
        {
            "proc/self/cgroup": "0::/../../outside\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/memory.max": "12345678\n",
            "sys/outside/memory.max": "1\n",
        }
    )
    assert read_memory_limit_bytes(root) == 12345678


def test_no_control_groups_at_all(plant):
    root = plant({"proc/self/status": "Name:\tx\nCpus_allowed_list:\t0-3\n"})
    assert read_memory_limit_bytes(root) is None
    assert read_oom_kills(root) is None
    assert count_usable_cores(root) == 4


def test_broken_files_count_as_no_limit(plant):
    root = plant(
        {
            "proc/self/cgroup": "garbage\n0::/a\n::\n",
            "proc/self/mountinfo": "garbage\n" + V2_MOUNT,
            "sys/fs/cgroup/a/memory.max": "",
            "sys/fs/cgroup/a/cpu.max": "max\n",
        }
    )
    assert read_memory_limit_bytes(root) is None
    assert read_cpu_quota_cores(root) is None


def test_oom_kills_fall_back_to_the_whole_machine(recorded):
    assert read_oom_kills(recorded) == 0


def test_room_is_what_the_tightest_group_leaves_and_idle_pages_of_files_count_as_room(plant):
    root = plant(
        {
            "proc/self/cgroup": "0::/user.slice/job.scope\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/user.slice/job.scope/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/user.slice/job.scope/memory.current": f"{1 * GIB}\n",
            "sys/fs/cgroup/user.slice/memory.max": f"{6 * GIB}\n",
            "sys/fs/cgroup/user.slice/memory.current": f"{5 * GIB}\n",
            "sys/fs/cgroup/user.slice/memory.stat": f"anon {3 * GIB}\ninactive_file {2 * GIB}\nactive_file 0\n",
        }
    )
    assert read_memory_room_bytes(root) == 3 * GIB


def test_room_in_v1_and_none_without_a_limit(plant):
    files = {
        "proc/self/cgroup": "4:memory:/batch/job7\n",
        "proc/self/mountinfo": V1_MOUNTS,
        "sys/fs/cgroup/memory/batch/job7/memory.limit_in_bytes": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory/batch/job7/memory.usage_in_bytes": f"{3 * GIB // 2}\n",
        "sys/fs/cgroup/memory/batch/job7/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
    }
    assert read_memory_room_bytes(plant(files)) == 3 * GIB // 2
    files["sys/fs/cgroup/memory/batch/job7/memory.limit_in_bytes"] = "9223372036854771712\n"
    assert read_memory_room_bytes(plant(files)) is None


def test_a_group_that_is_past_its_limit_has_no_room(plant):
    root = plant(
        {
            "proc/self/cgroup": "0::/a\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/a/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/a/memory.current": f"{GIB + 4096}\n",
        }
    )
    assert read_memory_room_bytes(root) == 0
