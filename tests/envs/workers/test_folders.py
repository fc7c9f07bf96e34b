"""A folder goes, whatever is in it, and nothing outside does."""

from __future__ import annotations

import os
import socket

import pytest

from qimeng.envs.workers.foreign_folders import remove_folder


def test_folders_deeper_than_any_path(tmp_path):
    top = tmp_path / "deep"
    top.mkdir()
    here = os.open(top, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("x" * 20, dir_fd=here)
        below = os.open("x" * 20, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    remove_folder(top)
    assert not top.exists()


def test_files_that_are_no_files_and_links_out(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    top = tmp_path / "top"
    (top / "a" / "b").mkdir(parents=True)
    (top / "1.moved").mkdir()
    (top / "1.moved" / "1.moved").mkdir()
    (top / "a" / "locked").mkdir(mode=0o000)
    os.mkfifo(top / "a" / "fifo")
    (top / "a" / "link").symlink_to(outside)
    (top / "loop").symlink_to(top)
    (top / os.fsdecode(b"\xff\xfe\n")).write_text("")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(top / "s"))
    remove_folder(top)
    assert not top.exists() and (outside / "kept").read_text() == "kept"


@pytest.mark.parametrize("what", ["nothing", "file", "link"])
def test_what_is_no_folder_stays(tmp_path, what):
    path = tmp_path / "it"
    if what == "file":
        path.write_text("x")
    if what == "link":
        path.symlink_to(tmp_path)
    remove_folder(path)
    assert what == "nothing" or path.exists()
