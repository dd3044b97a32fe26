"""Answers that are kept: what they depend on, how long and how many, and files that break."""

import concurrent.futures
import pickle
import sqlite3

import numpy as np
import pytest
from tests.unit.infer.fake_artefact import build_sample

from fulltilt.infer.serve.cache import Cache, decode_arrays, encode_arrays
from fulltilt.infer.serve.disk import FILE, Disk

OUTPUTS = (np.array([1.5, -2.0], np.float32), np.array([[3]], np.int64))


def build_cache(folder=None, *, said=None, now_s=(1000.0,), memory_bytes=1 << 20, most_bytes=1 << 20, **fields):
    said = [] if said is None else said
    disk = None if folder is None else Disk(folder, most_bytes=most_bytes, say=said.append)
    values = {"artefact": "a", "memory_bytes": memory_bytes, "expiry_s": 1e12, "disk": disk} | fields
    return Cache(clock=lambda: now_s[0], **values)


def read(cache, key):
    found = cache.get(key)
    return found and ([array.tolist() for array in found[0]], found[1])


@pytest.mark.parametrize("arrays", [OUTPUTS, (), (np.array(2.5),), (np.zeros((0, 3), np.uint8), np.array([True]))])
def test_arrays_become_bytes_and_come_back_equal(arrays):
    back = decode_arrays(encode_arrays(arrays))
    assert [(a.dtype, a.shape, a.tolist()) for a in back] == [(a.dtype, a.shape, a.tolist()) for a in arrays]


def test_bytes_that_changed_and_pickles_are_refused():
    data = bytearray(encode_arrays(OUTPUTS))
    data[-1] ^= 1
    for bad in (bytes(data), bytes(data[:9]), b"", pickle.dumps(OUTPUTS)):
        assert decode_arrays(bad) is None


def test_a_key_depends_on_artefact_values_types_and_shapes():
    sample = build_sample(1, 2)
    others = [build_sample(1, 3), (sample[0].reshape(2, 1),), (sample[0].view(np.int32),), (sample[0], sample[0])]
    keys = {build_cache().build_key(each) for each in (sample, *others)}
    keys |= {build_cache(artefact="b").build_key(sample)}
    assert len(keys) == 6
    assert build_cache().build_key(build_sample(1, 2)) in keys


def test_memory_forgets_what_was_not_used_for_longest_and_what_expired():
    now_s = [0.0]
    cache = build_cache(memory_bytes=3 * 420, expiry_s=10.0, now_s=now_s)
    for key in (b"1", b"2", b"3"):
        cache.put(key, OUTPUTS)
    cache.get(b"1")
    cache.put(b"4", OUTPUTS)
    assert [key for key in (b"1", b"2", b"3", b"4") if cache.get(key)] == [b"1", b"3", b"4"]
    assert cache.n_bytes <= 3 * 420
    now_s[0] = 10.5
    assert cache.get(b"4") is None
    cache.put(b"5", (np.zeros(9999),))
    assert cache.get(b"5") is None, "one that is larger than all memory is not kept"


def test_an_answer_that_is_kept_cannot_be_changed_and_keeps_no_batch_alive():
    batch, cache = np.zeros((1000, 2), np.float32), build_cache()
    cache.put(b"k", (batch[0],))
    batch[0] = 7
    kept = cache.get(b"k")[0][0]
    assert kept.tolist() == [0, 0]
    assert kept.base is None
    with pytest.raises(ValueError, match="read-only"):
        kept[0] = 1


def test_answers_outlive_the_server_until_they_expire(tmp_path):
    cache = build_cache(tmp_path)
    cache.put(b"k", OUTPUTS)
    cache.close()
    later = build_cache(tmp_path)
    assert read(later, b"k") == ([[1.5, -2.0], [[3]]], "disk")
    assert read(later, b"k") == ([[1.5, -2.0], [[3]]], "memory")
    later.close()
    much_later = build_cache(tmp_path, now_s=(2e12,))
    assert much_later.get(b"k") is None
    much_later.close()


def test_the_file_stays_within_its_size_and_the_oldest_go(tmp_path):
    disk = Disk(tmp_path, most_bytes=1 << 19, say=pytest.fail)
    for n in range(300):
        disk.write(str(n).encode(), bytes(8000), 1e12)
    disk.close()
    disk = Disk(tmp_path, most_bytes=1 << 19, say=pytest.fail)
    kept = [n for n in range(300) if disk.read(str(n).encode(), 0.0)]
    disk.close()
    assert 10 < len(kept) < 66
    assert kept == list(range(300 - len(kept), 300))
    assert (tmp_path / FILE).stat().st_size < 2 << 20


def test_where_few_answers_fit_only_as_many_go_as_have_to_and_one_that_is_too_large_is_not_kept(tmp_path):
    for n in range(20):
        disk = Disk(tmp_path, most_bytes=1 << 20, say=pytest.fail)
        disk.write(str(n).encode(), bytes(60_000), 1e12)
        disk.close()
    disk = Disk(tmp_path, most_bytes=1 << 20, say=pytest.fail)
    disk.write(b"large", bytes(2 << 20), 1e12)
    disk.close()
    disk = Disk(tmp_path, most_bytes=1 << 20, say=pytest.fail)
    kept = [n for n in range(20) if disk.read(str(n).encode(), 0.0)]
    assert disk.read(b"large", 0.0) is None
    disk.close()
    assert kept == list(range(20 - len(kept), 20))
    assert len(kept) >= 14


def damage_cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def damage_text(path):
    path.write_text("this was never a database, and it is longer than a header " * 100)


@pytest.mark.parametrize("damage", [damage_cut, damage_text])
def test_a_damaged_file_is_set_aside_with_a_note_and_a_new_one_begins(tmp_path, damage):
    said = []
    cache = build_cache(tmp_path)
    for n in range(64):
        cache.put(b"%d" % n, (np.zeros(1000),))
    cache.close()
    damage(tmp_path / FILE)
    cache = build_cache(tmp_path, said=said, memory_bytes=0)
    for n in range(64):  # one that is cut shows itself only where the rest is asked for
        cache.get(b"%d" % n)
        cache.put(b"%d" % n, (np.zeros(1000),))
    cache.put(b"new", OUTPUTS)
    cache.close()
    assert len(said) == 1
    assert "is damaged" in said[0]
    assert len(list(tmp_path.glob(f"{FILE}.damaged-*"))) == 1
    cache = build_cache(tmp_path, said=said)
    assert read(cache, b"new") == ([[1.5, -2.0], [[3]]], "disk")
    cache.close()


def test_one_flipped_byte_costs_one_answer(tmp_path):
    cache = build_cache(tmp_path)
    for key in (b"a", b"b"):
        cache.put(key, OUTPUTS)
    cache.close()
    with sqlite3.connect(tmp_path / FILE) as connection:
        connection.execute("UPDATE answers SET data = zeroblob(40) WHERE key = ?", (b"a",))
    connection.close()
    cache = build_cache(tmp_path, said=(said := []))
    assert (cache.get(b"a"), read(cache, b"b")[1], said) == (None, "disk", [])
    cache.close()


def test_a_disk_that_takes_nothing_more_is_told_of_once_and_memory_goes_on(tmp_path):
    said = []
    cache = build_cache(tmp_path, said=said)
    cache._disk._writer.execute("PRAGMA max_page_count = 1")  # SQLite answers as on a full disk
    for n in range(200):
        cache.put(b"%d" % n, (np.zeros(2000),))
    cache.put(b"k", OUTPUTS)
    cache.close()
    assert len(said) == 1
    assert "takes nothing more" in said[0]
    assert "full" in said[0]
    assert read(cache, b"k")[1] == "memory"


def test_a_folder_that_cannot_be_made_means_no_file_and_no_failure(tmp_path):
    (tmp_path / "file").write_text("")
    cache = build_cache(tmp_path / "file" / "below", said=(said := []))
    cache.put(b"k", OUTPUTS)
    assert read(cache, b"k")[1] == "memory"
    cache.close()
    assert len(said) == 1


def test_several_that_open_one_new_file_at_once_all_use_it(tmp_path):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        said = []
        caches = list(pool.map(lambda _: build_cache(tmp_path, said=said, memory_bytes=0), range(8)))
    for n, cache in enumerate(caches):
        cache.put(b"%d" % n, OUTPUTS)
        cache.close()
    cache = build_cache(tmp_path)
    assert all(cache.get(b"%d" % n) for n in range(8))
    cache.close()
    assert said == []
