"""Property tests: every tree of files is what it was after packing and extracting."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import hypothesis
from hypothesis import strategies as st

from pydist.packs import PackFiles, PackFileSystem, PackOptions, pack, verify
from support.trees import Tree, found, make, trees

OPTIONS = st.builds(
    PackOptions,
    partition_bytes=st.sampled_from([100, 1000, "1MB"]),
    codec=st.sampled_from(["raw", "zstd", "lz4"]),
    order=st.sampled_from(["shuffled", "sorted"]),
    seed=st.integers(0, 2**64 - 1),
)


@hypothesis.given(trees(), OPTIONS)
def test_what_is_extracted_is_what_was_packed(tree: Tree, options: PackOptions) -> None:
    with tempfile.TemporaryDirectory() as place:
        source, folder = Path(place, "source"), Path(place, "pack")
        make(tree, source)
        before = found(source)
        origin = pack(source, folder, options)
        kinds = [kind for kind, *_ in before.values()]
        assert origin["files"] == kinds.count("file")
        assert origin["folders"] == kinds.count("folder")
        assert origin["bytes"] == sum(len(content) for *_, content in before.values())
        assert verify(folder) == []
        PackFileSystem(folder).get("", f"{place}/extracted", recursive=True)
        assert found(Path(place, "extracted")) == before
        assert found(source) == before


@hypothesis.given(trees(), OPTIONS)
def test_every_way_to_read_agrees_with_the_files(tree: Tree, options: PackOptions) -> None:
    with tempfile.TemporaryDirectory() as place:
        source, folder = Path(place, "source"), Path(place, "pack")
        make(tree, source)
        pack(source, folder, options)
        files = PackFileSystem(folder)
        for path, (kind, mode, time, content) in found(source).items():
            name = "" if path == "." else path
            info = files.info(name)
            assert info["type"] == {"file": "file", "folder": "directory"}[kind]
            assert info["mode"] & 0o7777 == mode
            assert abs(info["mtime"] - time / 1e9) < 1e-5
            if kind == "folder":
                names = sorted(os.fsencode(child.name) for child in (source / name).iterdir())
                listed = [
                    os.fsencode(each.rpartition("/")[2]) for each in files.ls(name, detail=False)
                ]
                assert listed == names
            else:
                assert info["size"] == len(content)
                assert files.cat_file(name) == content
                with files.open(name) as opened:
                    assert opened.read() == content
                middle = len(content) // 2
                assert files.cat_file(name, middle, middle + 7) == content[middle : middle + 7]
        expected = {
            path: content for path, (kind, *_, content) in found(source).items() if kind == "file"
        }
        items = PackFiles(folder)
        assert dict(items[index] for index in range(len(items))) == expected


@hypothesis.given(trees(), st.integers(0, 2**64 - 1), st.integers(1, 5))
def test_partitions_differ_by_no_more_than_a_file(tree: Tree, seed: int, parts: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        source, folder = Path(place, "source"), Path(place, "pack")
        make(tree, source)
        pack(source, folder, PackOptions(partitions=parts, seed=seed))
        files = PackFileSystem(folder)
        filled = [0] * parts
        largest = 0
        for name in files.find(""):
            entry = files.entry(name)
            filled[entry.partition] += entry.size
            largest = max(largest, entry.size)
        assert len(list(folder.glob("part-*.pack"))) == parts
        assert max(filled) - min(filled) <= 2 * largest
