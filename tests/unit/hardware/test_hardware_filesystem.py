import os

import pytest

from fulltilt.hardware import read_filesystem, read_shm

MOUNTS = (
    "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
    "40 27 0:50 / /data rw - nfs4 server:/export rw\n"
    "41 40 0:51 / /data/scratch rw - xfs /dev/vdb rw\n"
    "42 27 0:52 / /mnt/c rw - 9p C:\\134 rw\n"
    "43 27 0:53 / /with\\040blank rw - tmpfs tmpfs rw\n"
    "44 27 0:54 / /covered rw - ext4 /dev/vdc rw\n"
    "45 27 0:55 / /covered rw - fuse.sshfs me@host: rw\n"
)


@pytest.mark.parametrize(
    ("path", "type_", "is_network"),
    [
        ("/home/me/train.py", "ext4", False),
        ("/data/images", "nfs4", True),
        ("/data", "nfs4", True),
        ("/database", "ext4", False),
        ("/data/scratch/images", "xfs", False),
        ("/mnt/c/Users", "9p", True),
        ("/with blank/x", "tmpfs", False),
        ("/covered/x", "fuse.sshfs", True),
    ],
)
def test_longest_and_latest_mount_wins(plant, path, type_, is_network):
    """Synthetic mount table."""
    filesystem = read_filesystem(path, plant({"proc/self/mountinfo": MOUNTS}))
    assert (filesystem.type, filesystem.is_network) == (type_, is_network)


def test_free_space_of_a_folder_that_is_yet_to_be_made(tmp_path):
    stat = os.statvfs(tmp_path)
    filesystem = read_filesystem(tmp_path / "runs" / "first")
    assert filesystem.type is not None
    assert filesystem.free_bytes == pytest.approx(stat.f_bavail * stat.f_frsize, rel=0.2)


def test_unknown_mount_table_is_not_a_local_disk(tmp_path):
    filesystem = read_filesystem("/home", tmp_path)
    assert filesystem.type is None
    assert filesystem.is_network is None


def test_symbolic_link_is_followed(plant, tmp_path):
    link = tmp_path / "link"
    link.symlink_to("/data/scratch")
    assert read_filesystem(link, plant({"proc/self/mountinfo": MOUNTS})).type == "xfs"


def test_shm(tmp_path):
    assert read_shm(tmp_path) == (None, None)
    total_bytes, used_bytes = read_shm()
    if total_bytes is None:
        pytest.skip("no /dev/shm on this system")
    assert used_bytes is not None
    assert 0 <= used_bytes <= total_bytes
