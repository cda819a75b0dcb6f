"""Tests that programs print the same on a mounted pack as on the folder that was packed."""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pydist._loader import native
from pydist.cli.mounting import mounted
from pydist.packs import PackOptions, pack
from support.mounts import Case

COMMANDS = {
    "cat": "cat lines class/a/*.bin",
    "globs": "echo * */ class/*/1.bin [lu]*; shopt -s globstar; printf '%s\\n' **/*.bin",
    "redirection": "cksum < large; cksum < lines; read -r line < lines; echo $line; cat < empty",
    "one descriptor": "(head -c 99 >/dev/null; cksum) < large; exec 7< lines; read -u 7 x; cat <&7",
    "proc": "cat /dev/stdin < large | cksum; cat /proc/self/fd/0 < lines | cksum",
    "cd": "cd class/a && pwd && cd ../b && pwd -P && cd ../.. && pwd && ls -a . .. | sort -u",
    "above": "cd class; cat ../lines | tail -1; ls ../../$(basename $ROOT)/class",
    "find": "find . | sort; find . -size +8k -name '*.bin' | sort; find $ROOT -empty|sort",
    "find actions": "find . -name '*.bin' -printf '%P %s %m %T@ %y %h %f\\n' | sort",
    "find newer": "find . -newer lines | sort; find . -samefile class/../lines",
    "find exec": "find . -name '0.bin' -exec cksum {} + | sort; find . -execdir pwd \\; | sort -u",
    "ls": "ls -aRp; ls -ln --full-time lines class/a/* script; ls -Us class/b | sort",
    "stat": "stat -c '%n %s %f %F %Y %y' lines large class/a/*; stat -Lc '%s' /dev/stdin < lines",
    "test": "test -e empty; echo $?; test -s empty; echo $?; test -x script; echo $?; [ -d class ]",
    "same file": "[ lines -ef ../$(basename $ROOT)/class/../lines ]; echo $?; [ lines -ef large ]",
    "grep": "grep -rc 'line 99' . | sort; grep -l text *",
    "sums": "sha256sum large lines class/*/*; md5sum < large",
    "wc": "wc lines; wc -c large; wc -c < large",
    "tail": "tail -c 999 large | cksum; tail -n 3 lines; head -n 2 lines; tac lines | head -1",
    "dd": "dd if=large bs=1000 skip=7 count=11 status=none | cksum",
    "compare": "cmp large large && echo same; cmp large lines; diff -r class/a class/b | sort",
    "sort": "sort -r lines | cksum; sort -n -k 2 lines | tail -1; comm -12 lines lines | cksum",
    "tar": "tar cf - --sort=name --numeric-owner . | cksum; tar cSf - large | tar xOf - | cksum",
    "du": "du -b --apparent-size class/a/* lines large | sort",
    "script": "./script one; bash script two; sh ./script three; . ./script four",
    "script by other ways": "PATH=.:$PATH; script x 'a b'; find . -name script -exec {} y \\; ; "
    'python3 -c \'import os; os.spawnlp(os.P_WAIT, "./script", "name", "z")\'',
    "programs on the path": "PATH=$ROOT:$PATH; env script a; nice script b; echo | xargs script; "
    "timeout 9 script c; env no; PATH=: /usr/bin/env script d; cd class; "
    "PATH=..:/bin env script e; PATH=: /usr/bin/env script",
    "programs on the path, by calls": """PATH=$ROOT:$PATH exec python3 -c '
import os
child = os.posix_spawnp("script", ["name", "a"], os.environ)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os.execvp("script", ["name", "b"])'""",
    "awk": "awk 'END { print NR }' lines; sed -n 5p lines; cut -d' ' -f2 lines | cksum",
    "folders as files": "md5sum class; sort class; grep x class; wc class; fold class",
    "errors": "cat nothing; ls nothing/x; cat class; cd lines; cat lines/; ls lines/.",
    "realpath": "realpath . class/../lines nothing; readlink -f class/a; cd class; realpath ..",
    "pipes": "cat large | (sleep 0; cksum) & wait; xargs -n 2 cksum < <(ls class/a/* | sort)",
}


@pytest.mark.parametrize("large", [None, "1B"])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_shell_command_prints_the_same(case: Case, name: str, large: str | None) -> None:
    command = ["bash", "-c", COMMANDS[name]]
    assert case.packed(*command, large=large) == case.loose(*command)


@pytest.mark.parametrize("mask", ["027", "077"])
def test_open_folders_are_the_same_with_another_umask(case: Case, mask: str) -> None:
    walk = """
import os
for folder, folders, files, descriptor in os.fwalk("."):
    found, other = os.fstat(descriptor), os.stat(folder)
    print(folder, sorted(folders), sorted(files), oct(found.st_mode))
    assert os.path.samestat(found, other)
"""
    command = ["sh", "-c", f'umask {mask}; exec "$@" | sort', "sh", sys.executable, "-c", walk]
    assert case.packed(*command) == case.loose(*command)


PARENTS = """
realpath . ../.. ../../a/b/point/lines; readlink -f ../point/lines ..; realpath -e $ROOT/../..
stat -c '%F' .. ../.. $ROOT/..; find ../../../a | sort; ls -aR ../..; test -d $ROOT/../../b
cd ..; pwd; pwd -P; ls; cat point/lines; cat ../b/point/lines; cd ../b/..; pwd; cat b/point/lines
python3 -c 'import os, pathlib; print(os.getcwd(), pathlib.Path("b/point").resolve(strict=True))'
cd b/point; pwd; cd -; ls; cat other b/other $ROOT/../other; ls nothing
readlink /proc/self/cwd; cksum < $ROOT/../../../../packs/index.pdx; stat -c %F $ROOT/../../../..
cat ../../packs/index.pdx | cksum; cd ../../packs; ls; pwd
"""


def test_parents_of_the_mount_point_need_not_exist(tmp_path: Path) -> None:
    there = tmp_path / "there" / "a" / "b" / "point"
    there.mkdir(parents=True)
    (there / "lines").write_text("some\n")
    pack(there, tmp_path / "packs")
    case = Case(there, tmp_path / "packs", tmp_path / "gone" / "a" / "b" / "point")
    command = ["bash", "-c", PARENTS]
    loose = case.loose(*command).replace(b"/there", b"/gone")
    assert b"No such file" in loose
    assert case.packed(*command) == loose
    # Nothing can be made there.
    parent = case.mount.parent
    made = f"mkdir {parent}/q; > {parent}/q; cd {parent}; mkdir q; > q; ls"
    shown = case.packed("bash", "-c", made)
    assert shown.count(b"No such file") == 4
    assert shown.endswith(b"\npoint\nexit code 0")
    assert not (tmp_path / "gone").exists()


def test_programs_on_the_path_without_a_first_line_are_those_of_the_shell(tmp_path: Path) -> None:
    there = tmp_path / "there"
    (there / "bin").mkdir(parents=True)
    (there / "bin" / "plain").write_text("echo ran $1\n")
    (there / "bin" / "plain").chmod(0o755)
    (there / "bin" / "closed").write_text("#!/bin/sh\n")
    pack(there, tmp_path / "packs")
    case = Case(there, tmp_path / "packs", tmp_path / "mount")
    command = ["bash", "-c", "PATH=$ROOT/bin:$PATH; env plain a; timeout 9 plain b; env closed"]
    assert b"ran a\nran b\n" in case.loose(*command)
    assert case.packed(*command) == case.loose(*command)


def test_a_path_leaves_the_mount_point_often_in_a_thread_with_a_small_stack(case: Case) -> None:
    script = """
import os, pathlib, threading
path = f"../{pathlib.Path(os.environ['ROOT']).name}/" * 150 + "lines"
threading.stack_size(1 << 18)
thread = threading.Thread(target=lambda: print(os.stat(path).st_size))
thread.start()
thread.join()
"""
    command = [sys.executable, "-c", script]
    assert case.packed(*command) == case.loose(*command)


def test_listing_a_folder_takes_time_in_proportion_to_its_files(tmp_path: Path) -> None:
    """Not to their square, as when each file that is listed checks all of its folder."""
    count = 30_000
    writer = native.PartitionWriter(os.fsencode(tmp_path / native.partition_name(0)), 0, bytes(16))
    index = native.IndexWriter(0o755, 0)
    for number in range(count):
        index.add(0, b"%06d" % number, False, 0o644, 0)
    content = index.content(bytes(16), [writer.finish()], "{}")
    (tmp_path / native.PACK_INDEX).write_bytes(content)
    with mounted("/nowhere/data", str(tmp_path)) as environment:
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        listed = subprocess.run(
            ["ls", "-f", "/nowhere/data"], env=environment, capture_output=True, check=True
        )
        seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    assert len(listed.stdout.splitlines()) == count + 2
    assert seconds < 1


def test_whole_trees_are_copied(case: Case, tmp_path: Path) -> None:
    script = f"cp -a . {tmp_path}/cp; cp --sparse=always large {tmp_path}/sparse"
    assert case.packed("bash", "-c", script, large="1MB") == b"exit code 0"
    tar = f"mkdir {tmp_path}/tar; tar cSf - . | tar xf - -C {tmp_path}/tar"
    assert case.packed("bash", "-c", tar, large="1MB") == b"exit code 0"
    for copy in ("cp", "tar"):
        compared = subprocess.run(["diff", "-r", case.folder, tmp_path / copy], check=False)
        assert compared.returncode == 0
        times = [(p.stat().st_mode, p.stat().st_mtime_ns) for p in sorted(case.folder.rglob("*"))]
        found = sorted((tmp_path / copy).rglob("*"))
        assert [(p.stat().st_mode, p.stat().st_mtime_ns // 10**9) for p in found] == [
            (mode, time // 10**9) for mode, time in times
        ]
    assert (tmp_path / "sparse").read_bytes() == (case.folder / "large").read_bytes()


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_calls_of_c_programs(case: Case, tmp_path: Path) -> None:
    source = Path(__file__).with_name("calls.c")
    for flags in (["-O0"], ["-O2", "-D_FORTIFY_SOURCE=2", "-D_FILE_OFFSET_BITS=64"]):
        program = tmp_path / "calls"
        subprocess.run(["gcc", "-w", *flags, source, "-o", program, "-lpthread"], check=True)
        loose = case.loose(program)
        assert loose.count(b"\n") > 300
        assert loose.endswith(b"exit code 0")
        for large in (None, "1B"):
            packed = case.packed(program, large=large)
            assert sorted(packed.splitlines()) == sorted(loose.splitlines())


@pytest.mark.parametrize("large", [None, "1B"])
def test_python_and_its_libraries(case: Case, tmp_path: Path, large: str | None) -> None:
    program = Path(__file__).with_name("libraries.py")
    loose = case.loose(sys.executable, program, str(tmp_path / "loose"))
    assert loose.endswith(b"exit code 0"), loose.decode()
    packed = case.packed(sys.executable, program, str(tmp_path / "packed"), large=large)
    assert packed.decode() == loose.decode()


def test_large_files_are_not_copied_into_memory(case: Case) -> None:
    # 5 MiB are read through one buffer and mapped, but for the last page.
    program = """
import mmap, os, sys
def shared():
    return int(open("/proc/self/statm").read().split()[2]) * mmap.PAGESIZE
with open("large", "rb", buffering=0) as file:
    while file.read(4096): pass
    file.seek(0)
    in_kernel = os.stat(f"/proc/self/fd/{file.fileno()}").st_size
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        lines = open("/proc/self/maps").read().splitlines()
        print(sum("part-" in line for line in lines))
        first, end = next(line for line in lines if "memfd" in line).split()[0].split("-")
        print((int(end, 16) - int(first, 16)) // mmap.PAGESIZE)
"""
    output = case.packed(sys.executable, "-S", "-c", program, large="1MB")
    assert output == b"1\n1\nexit code 0"


DISCARDS = """
import hashlib, mmap, sys
with open(sys.argv[1], "rb") as file:
    for start in (0, mmap.PAGESIZE):
        for kind in (mmap.MAP_SHARED, mmap.MAP_PRIVATE):
            mapped = mmap.mmap(file.fileno(), 0, kind, mmap.PROT_READ, offset=start)
            digests = []
            for _ in range(2):
                digests.append(hashlib.md5(mapped).hexdigest())
                mapped.madvise(mmap.MADV_DONTNEED)
            print(digests, file.seek(0), hashlib.md5(file.read()[start:]).hexdigest())
"""


@pytest.mark.parametrize("name", ["large", "array.npy", "lines"])
def test_discarded_pages_of_mapped_files_are_read_again(case: Case, name: str) -> None:
    command = [sys.executable, "-S", "-c", DISCARDS, name]
    loose = case.loose(*command)
    assert loose.endswith(b"exit code 0"), loose.decode()
    assert case.packed(*command, large="1B") == loose


BETWEEN_THREADS = """
import fcntl, os, signal, socket, struct, termios, threading, time
signal.alarm(60)
large = os.dup2(os.open("large", os.O_RDONLY), 70)
lines = os.dup2(os.open("lines", os.O_RDONLY), 6)  # 64 less
here, there = socket.socketpair()
size = os.fstat(large).st_size

def send():
    sent = 0
    while sent < size:
        sent += os.sendfile(here.fileno(), large, None, size - sent)
    here.close()

thread = threading.Thread(target=send)
thread.start()
waiting = -1
while True:  # until the socket is full
    now = struct.unpack("i", fcntl.ioctl(there, termios.FIONREAD, b"0000"))[0]
    if now == waiting > 0:
        break
    waiting = now
    time.sleep(0.2)
print(os.read(lines, 20), waiting < size)
received = bytearray()
while part := there.recv(1 << 20):
    received += part
thread.join()
print(received == open("large", "rb").read(), os.lseek(large, 0, os.SEEK_CUR))
"""


@pytest.mark.parametrize("large", [None, "1B"])
def test_a_thread_reads_while_another_one_sends_a_file_to_it(case: Case, large: str | None) -> None:
    command = [sys.executable, "-c", BETWEEN_THREADS]
    loose = case.loose(*command)
    assert loose.endswith(b"exit code 0"), loose.decode()
    assert case.packed(*command, large=large) == loose


STARTS = """
import os, subprocess, sys
assert subprocess._USE_VFORK
print(subprocess.run(["./script"], capture_output=True, text=True).stdout)
for name in sys.argv[1:]:
    with open(name, "rb", buffering=0) as file:
        print(name, file.read(9))
"""


@pytest.mark.parametrize("large", [None, "1MB"])
def test_a_program_leaves_no_descriptor_in_the_parent_of_its_vfork(
    tmp_path: Path, large: str | None
) -> None:
    """Else files of other partitions are read, without an error where they are read in place."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "script").write_text("#!/bin/sh\necho started\n")
    (folder / "script").chmod(0o755)
    for name in ("script 1", "script 2"):
        (folder / name).write_bytes(name[-1:].encode() * (5 << 20))
    pack(folder, tmp_path / "packs", PackOptions(partitions=2, order="sorted"))
    case = Case(folder, tmp_path / "packs", tmp_path / "mount")
    command = [sys.executable, "-c", STARTS, "script 2", "script 1", "script"]
    loose = case.loose(*command)
    assert loose.startswith(b"started\n")
    assert case.packed(*command, large=large) == loose


INTERPRETERS = """
import os, subprocess
def start(name):
    try:
        print(subprocess.run([f"./{name}", "a", "b c"], capture_output=True, text=True).stdout)
    except OSError as error:
        print(error)
for name in ("tool", "nested", "loop", "none", "closed"):
    start(name)
child = os.posix_spawn("./nested", ["name", "d"], os.environ)
print(os.waitpid(child, 0)[1])
for name in ("loop", "none"):
    try:
        os.posix_spawn(f"./{name}", ["name"], os.environ)
    except OSError as error:
        print(error)
"""


def test_interpreters_of_packed_scripts_can_be_packed(tmp_path: Path) -> None:
    there = tmp_path / "there"
    (there / "bin").mkdir(parents=True)
    shutil.copy(os.path.realpath("/bin/sh"), there / "bin" / "sh")
    (there / "plain").write_text("")
    scripts = {
        "run": "bin/sh -e", "tool": "bin/sh", "nested": "run -x", "loop": "loop", "none": "nothing",
        "closed": "plain",
    }  # fmt: skip
    for name, interpreter in scripts.items():
        (there / name).write_text(f"#!{interpreter}\necho $0 $1 $2 $3 $4\n")
        (there / name).chmod(0o755)
    pack(there, tmp_path / "packs")
    case = Case(there, tmp_path / "packs", tmp_path / "mount")
    command = [sys.executable, "-c", INTERPRETERS]
    loose = case.loose(*command)
    assert b"./tool a b c\n" in loose
    assert b"run -x ./nested a b c\n" in loose
    assert b"Too many levels" in loose
    assert case.packed(*command) == loose


def test_a_packed_binary_starts_as_its_child_closes_descriptors(tmp_path: Path) -> None:
    """As that of subprocess does from Python 3.13 on."""
    (tmp_path / "folder").mkdir()
    shutil.copy(os.path.realpath("/bin/echo"), tmp_path / "folder" / "say")
    pack(tmp_path / "folder", tmp_path / "packs")
    program = """
import os
actions = [(os.POSIX_SPAWN_CLOSE, number) for number in range(3, 256)]
child = os.posix_spawn("./say", ["say", "started"], os.environ, file_actions=actions)
print(os.waitpid(child, 0)[1])
"""
    case = Case(tmp_path / "folder", tmp_path / "packs", tmp_path / "mount")
    command = [sys.executable, "-c", program]
    assert case.loose(*command) == b"started\n0\nexit code 0"
    assert case.packed(*command) == b"started\n0\nexit code 0"


def test_parents_of_symbolic_links_are_those_of_their_targets(case: Case, tmp_path: Path) -> None:
    """Links that lead from a real folder to another one, on paths that lead to the mount point."""
    (tmp_path / "inner" / "deep").mkdir(parents=True)
    (tmp_path / "inner" / "mount").mkdir()
    (tmp_path / "inner" / "mount" / "lines").write_text("real\n")
    (tmp_path / "down").symlink_to(tmp_path / "inner" / "deep")
    (tmp_path / "inner" / "up").symlink_to(tmp_path / "inner")
    (tmp_path / "file").touch()
    with mounted(f"{tmp_path}/mount", str(case.packs)) as environment:
        script = """
            cat down/../mount/lines
            head -n 1 inner/up/../mount/lines $PWD/inner/up/../mount/lines
            head -n 1 inner/deep/../../mount/class/../lines inner/../mount/lines
            cat file/../mount/lines; cat nothing/../mount/lines
        """
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env={**environment, "LC_ALL": "C"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    first, *others = (line for line in done.stdout.splitlines() if line and "==>" not in line)
    assert first == "real"
    assert others == ["line 0"] * 4, done.stdout + done.stderr
    errors = [line.rpartition(": ")[2] for line in done.stderr.splitlines()]
    assert errors == ["Not a directory", "No such file or directory"]


LIBRARY = r"""
#include <stdio.h>
#include <string.h>
#include <unistd.h>
__attribute__((constructor)) static void begin(void) {
  fclose(fopen(PLACE "/begun", "w"));
  while (access(PLACE "/go", F_OK) != 0) usleep(1000);
}
size_t ZSTD_compressBound(size_t size) { return size; }
size_t ZSTD_compress(void* to, size_t room, const void* from, size_t size, int level) { return 0; }
size_t ZSTD_decompress(void* to, size_t size, const void* from, size_t stored) {
  memset(to, 0, size);
  return size;
}
unsigned ZSTD_isError(size_t code) { return 0; }
const char* ZSTD_getErrorName(size_t code) { return ""; }
"""

FORKS = """
import os, pathlib, signal, sys, threading, time
signal.alarm(60)
here = pathlib.Path(sys.argv[1])
found = []
# The linker's lock is held, too, so all functions are looked up before.
(here / "begun").exists(), open("raw", "rb").read()
if os.fork() == 0:
    os._exit(0)
os.wait()
thread = threading.Thread(target=lambda: found.append(open("one", "rb").read()))
thread.start()
while not (here / "begun").exists():
    time.sleep(0.01)
child = os.fork()
if child == 0:
    signal.alarm(20)
    os._exit(any(open("other", "rb").read()))
status = os.wait()[1]
open(here / "go", "w").close()
thread.join()
print(status, found == [bytes(5000)])
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_a_fork_while_a_thread_opens_the_library_of_a_codec(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    for name in ("one", "other"):
        (tmp_path / "source" / name).write_bytes(bytes(5000))
    (tmp_path / "source" / "raw").write_bytes(b"raw")
    pack(tmp_path / "source", tmp_path / "pack", PackOptions(codec="zstd"))
    (tmp_path / "library.c").write_text(LIBRARY)
    place = f'-DPLACE="{tmp_path}"'
    command = ["gcc", "-shared", "-fPIC", place, "library.c", "-o", "libzstd.so.1"]
    subprocess.run(command, cwd=tmp_path, check=True)
    program = [sys.executable, "-c", FORKS, str(tmp_path)]
    with mounted("/nowhere/data", str(tmp_path / "pack")) as environment:
        done = subprocess.run(
            ["bash", "-c", 'cd /nowhere/data && exec "$@"', "", *program],
            env={**environment, "LD_LIBRARY_PATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.stdout == "0 True\n", done.stderr


ALLOCATOR = r"""
#include <stdlib.h>
#include <unistd.h>
void* __libc_malloc(size_t size);
void* malloc(size_t size) {
  static enum { BEFORE, WITHIN, DONE } begun;
  if (begun == WITHIN) _exit(9);  /* jemalloc would wait for its own lock */
  if (begun == BEFORE) {
    char text[100];
    begun = WITHIN;
    readlink("/etc/malloc.conf", text, sizeof text);
    begun = DONE;
  }
  return __libc_malloc(size);
}
__attribute__((constructor)) static void begin(void) { free(malloc(1)); }
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_an_allocator_reads_its_settings_in_its_first_call(case: Case, tmp_path: Path) -> None:
    (tmp_path / "allocator.c").write_text(ALLOCATOR)
    command = ["gcc", "-shared", "-fPIC", "allocator.c", "-o", "allocator.so"]
    subprocess.run(command, cwd=tmp_path, check=True)
    with case.environment() as environment:
        environment["LD_PRELOAD"] += f":{tmp_path}/allocator.so"
        done = subprocess.run(
            ["cat", case.mount / "lines"], env=environment, capture_output=True, check=False
        )
    assert (done.returncode, done.stdout) == (0, (case.folder / "lines").read_bytes())


def test_a_damaged_file_fails_with_one_line(case: Case, tmp_path: Path) -> None:
    packs = tmp_path / "packs"
    shutil.copytree(case.packs, packs)
    digests = {hashlib.md5(path.read_bytes()).hexdigest() for path in packs.iterdir()}
    for part in packs.glob("part-*"):
        content = bytearray(part.read_bytes())
        content[100:] = bytes(byte ^ 1 for byte in content[100:])
        part.write_bytes(content)
    assert digests != {hashlib.md5(path.read_bytes()).hexdigest() for path in packs.iterdir()}
    damaged = Case(case.folder, packs, case.mount)
    lines = damaged.packed("cat", "lines", "script").decode().splitlines()
    assert lines[0].startswith("pydist: ")
    assert "lines: damaged: it does not match its checksum" in lines[0]
    assert lines[1:] == [
        "cat: lines: Input/output error",
        "cat: script: Input/output error",
        "exit code 1",
    ]


def test_an_inherited_file_of_a_pack_that_is_gone_fails_with_one_line(
    case: Case, tmp_path: Path
) -> None:
    packs = tmp_path / "packs"
    shutil.copytree(case.packs, packs)
    program = f"""
import os, shutil, subprocess
with open("large", "rb") as file:
    os.chdir("/")
    shutil.rmtree({str(packs)!r})
    subprocess.run(["cat"], stdin=file)
"""
    output = Case(case.folder, packs, case.mount).packed(
        sys.executable, "-S", "-c", program, large="1MB"
    )
    first, *lines = output.decode().splitlines()
    assert first.startswith(f"pydist: {packs}/index.pdx: No such file or directory")
    assert lines == ["cat: -: Input/output error", "exit code 0"]
