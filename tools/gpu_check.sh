#!/bin/sh
# Runs everything that needs a GPU, in one command of less than 9 minutes, without a network: builds
# for the device, runs the GPU tests, the kernels' tests under compute-sanitizer's four tools, and
# the GPU benchmarks. Continues after a failure; prints one summary.
#
#   tools/gpu_check.sh FOLDER        # e.g. benchmarks/results/gpu
#
# Tests are in several parts, which run at the same time: a broken device context or a hang ends only
# its own part. Benchmarks run after them, alone. A part that is out of time is interrupted and
# reports its failures and position.
#
# FOLDER gets gpu_check.json (device, driver, versions, commit; verdict, counts and seconds of each
# part), the benchmarks' results and logs/. Python is $PYTHON (python3), with torch for CUDA;
# compute-sanitizer and nvcc come with the CUDA toolkit ($COMPUTE_SANITIZER, $CUDACXX override
# them). $COMMIT names the commit if the folder is no git checkout. $GPU_CHECK_PARTS selects parts
# ("build gpu_step"), $GPU_CHECK_SECONDS sets another limit for all of them.
#
# Exit code: 0 all passed, 1 something failed, 2 no GPU was found or no folder was named.
set -u
[ $# = 1 ] || { echo "usage: tools/gpu_check.sh FOLDER" >&2; exit 2; }
mkdir -p "$1" && out=$(cd "$1" && pwd) || exit 2
cd "$(dirname "$0")/.." || exit 2
device=$(nvidia-smi --query-gpu=name,driver_version,compute_cap --format=csv,noheader 2>/dev/null |
  head -n 1)
[ -n "$device" ] || { echo "gpu_check: no GPU (nvidia-smi finds none)" >&2; exit 2; }

python=${PYTHON:-python3}
PATH=$PATH:/usr/local/cuda/bin # nvcc's default location
sanitizer=${COMPUTE_SANITIZER:-compute-sanitizer}
native=build/dev/tests/native/gpu/pydist_gpu_tests
logs=$out/logs
mkdir -p "$logs"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=4 PYTHONUNBUFFERED=1

# Time limit of all parts together: remaining parts are then reported as not run.
ends=$(($(date +%s) + ${GPU_CHECK_SECONDS:-525}))
parts=$logs/parts.tsv
: >"$parts"

# part NAME SECONDS COMMAND...: runs a part within its time limit and the remaining total time.
part() {
  case " ${GPU_CHECK_PARTS:-$1} " in *" $1 "*) ;; *) return ;; esac
  name=$1 limit=$2
  shift 2
  left=$((ends - $(date +%s)))
  [ "$left" -ge "$limit" ] || limit=$left
  began=$(date +%s)
  if [ "$limit" -lt 5 ]; then
    verdict='no time'
    : >"$logs/$name.log"
  else
    printf '== %s (at most %s s)\n' "$name" "$limit"
    timeout -s INT -k 10 "$limit" "$@" >"$logs/$name.log" 2>&1
    case $? in
      0) verdict=passed ;;
      124 | 137) verdict='out of time' ;;
      *) verdict=FAILED ;;
    esac
  fi
  printf '%s\t%s\t%s\n' "$name" "$verdict" "$(($(date +%s) - began))" >>"$parts"
  [ "$verdict" = passed ] || tail -n 5 "$logs/$name.log"
}

capability=$(echo "$device" | sed 's/.*, *//; s/[^0-9]//g')
part build 240 env PYTHON="$python" JOBS="$(nproc)" tools/dev-build -DPYDIST_CUDA=ON \
  -DPYDIST_CUDA_ARCHITECTURES="$capability" -DPYDIST_BUILD_GPU_TESTS=ON
part kernels 30 "$native"
# Warnings of other torch versions are not failures of a kernel.
tests() {
  name=$1 limit=$2
  shift 2
  modules=$(printf ' tests/gpu/test_%s_gpu.py' "$@")
  # shellcheck disable=SC2086  # names without spaces
  part "tests_$name" "$limit" "$python" -m pytest $modules -q --tb=short -W default \
    -p no:cacheprovider -o faulthandler_timeout=40
}
sanitize() {
  for tool in "$@"; do
    part "$tool" 120 "$sanitizer" --tool "$tool" --error-exitcode 9 "$native"
  done
}
benchmark() {
  part "$1" $(($2 + 30)) "$python" "benchmarks/python/$1.py" --seconds "$2" --json "$out/$1.json"
}
tests kernels 70 kernels conv norm &
tests operators 160 format operators &
tests steps 110 graph input streams &
tests ranks 200 split forms training prediction cuda_mpi &
tests transports 160 nccl ipc staged &
tests split_operators 160 split_operators &
sanitize memcheck initcheck &
sanitize racecheck synccheck &
wait
tests profile 40 profile # it compares times
# The most important benchmarks come first: after a slow build, the last ones have no time.
benchmark gpu_step 40
benchmark gpu_boundary 30
benchmark gpu_pack 25
benchmark gpu_overlap 60
benchmark gpu_shards 35
benchmark gpu_unet 60
benchmark gpu_transports 40
benchmark gpu_whole 60
benchmark gpu_input 15

DEVICE=$device COMMIT=${COMMIT:-$(git rev-parse HEAD 2>/dev/null)} \
  "$python" tools/gpu_summary.py "$logs" "$out/gpu_check.json"
