"""Tests of memory reuse: freed memory stays in the process unless settings say otherwise."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys

import pytest

from pydist.memory import VARIABLE
from support.jobs.children import child_environment

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")

BLOCK = 64 << 20
PAGES = BLOCK // os.sysconf("SC_PAGE_SIZE")

FAULTS = """
import resource, torch

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(16 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

"""
REPEATED = """
for _ in range(10):
    faults()
print(sum(faults() for _ in range(10)) // 10)
"""


def run(program: str, folder, **variables: str) -> str:
    """Returns the output of a fresh process with only the given allocator settings."""
    environment = child_environment(**{VARIABLE: "1", **variables})
    for name in list(environment):
        if name not in variables and name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")):
            del environment[name]
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def faults_after(setup: str, folder, **variables: str) -> int:
    """Returns the page faults of a 64 MiB block after a few allocations and frees of it."""
    return int(run(f"{FAULTS}{setup}\n{REPEATED}", folder, **variables))


def test_large_blocks_fault_as_the_allocator_comes(tmp_path):
    """This is the baseline of the other tests."""
    assert faults_after("", tmp_path) >= PAGES


def test_init_keeps_them(tmp_path):
    assert faults_after("import pydist; pydist.init(transport='local')", tmp_path) < PAGES / 10


@pytest.mark.parametrize(
    ("argument", "variables"),
    [
        ("keep_freed_memory=False", {}),
        ("", {VARIABLE: "0"}),
        ("", {"MALLOC_TOP_PAD_": "131072"}),
        ("", {"GLIBC_TUNABLES": "glibc.malloc.arena_max=4:glibc.malloc.mmap_max=65536"}),
    ],
)
def test_init_leaves_the_allocator_alone(tmp_path, argument, variables):
    setup = f"import pydist; pydist.init(transport='local', {argument})"
    assert faults_after(setup, tmp_path, **variables) >= PAGES


def test_other_settings_of_the_user_do_not_matter(tmp_path):
    setup = "from pydist.memory import keep_freed_memory; assert keep_freed_memory()"
    variables = {"MALLOC_ARENA_MAX": "2", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=4"}
    assert faults_after(setup, tmp_path, **variables) < PAGES / 10


def test_a_wrong_value_is_named(tmp_path):
    program = """
from pydist.errors import UsageError
from pydist.memory import keep_freed_memory
try:
    keep_freed_memory()
except UsageError as error:
    print(error)
"""
    assert run(program, tmp_path, **{VARIABLE: "no"}) == f"{VARIABLE}=no: 0 or 1 is possible"


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("symbol", ["malloc", "mallopt"])
def test_a_preloaded_allocator_is_left_alone(tmp_path, symbol):
    source = {
        "malloc": "#include <stddef.h>\nvoid *__libc_malloc(size_t);\n"
        "void *malloc(size_t n) { return __libc_malloc(n); }\n",
        "mallopt": "int mallopt(int name, int value) { return 1; }\n",
    }[symbol]
    (tmp_path / "other.c").write_text(source)
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", "other.so", "other.c"], cwd=tmp_path, check=True
    )
    program = "from pydist import memory; print(memory.keep_freed_memory(), memory.give_back())"
    assert run(program, tmp_path) == "True True"
    assert run(program, tmp_path, LD_PRELOAD=str(tmp_path / "other.so")) == "False False"


def test_kept_memory_can_be_given_back(tmp_path):
    program = f"""
import torch
from pathlib import Path
from pydist.memory import give_back, keep_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) / {PAGES}

assert keep_freed_memory()
before = resident()
blocks = [torch.ones(16 << 20) for _ in range(3)]
del blocks
kept = resident()
assert give_back()
print(kept - before, resident() - before)
"""
    kept, left = map(float, run(program, tmp_path).split())
    assert kept > 2.5
    assert left < 0.5


RELIEVED = """
import torch
from pathlib import Path
import pydist
from pydist.memory import relieve

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1])

pydist.init(transport='local', {argument})
torch.ones(7 << 20)  # from now on blocks below 32 MiB come from the heap
relieve()
before = resident()
blocks = [torch.ones(2 << 20) for _ in range(8)]
last = torch.ones(1 << 18)  # after them, so the end of the heap stays in place
del blocks
free = resident() - before
relieve()
print(free * {page} // 2**20, (resident() - before) * {page} // 2**20)
"""


@pytest.mark.parametrize(
    ("argument", "variables", "relieved"),
    [
        ("keep_freed_memory=False", {}, True),
        ("", {VARIABLE: "0"}, True),
        ("", {}, False),
        ("keep_freed_memory=False", {"MALLOC_MMAP_THRESHOLD_": "33554432"}, False),
    ],
)
def test_what_is_free_goes_back_where_it_is_not_kept(tmp_path, argument, variables, relieved):
    program = RELIEVED.format(argument=argument, page=os.sysconf("SC_PAGE_SIZE"))
    free, left = map(int, run(program, tmp_path, **variables).split())
    assert free > 30
    assert left < 8 if relieved else left > 30
