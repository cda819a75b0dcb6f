#!/bin/sh
# On a machine with a CUDA device: the GPU tests, plain and under compute-sanitizer, then a summary.
#
#   tools/sanitize_gpu.sh            # an environment with torch for CUDA and pydist built with CUDA
#
# compute-sanitizer comes with the CUDA toolkit, or from PyPI as nvidia-cuda-sanitizer-api. The
# summary names device, driver and commit; keep it under benchmarks/results/.
set -u
cd "$(dirname "$0")/.." || exit 2

python=${PYTHON:-python3}
sanitizer=${COMPUTE_SANITIZER:-compute-sanitizer}
"$python" - <<'END' || exit 2
import sys
import torch
from pydist import _native as native
if not native.has_cuda or native.cuda_device_count() == 0 or not torch.cuda.is_available():
    sys.exit(f"sanitize_gpu: needs a CUDA device, pydist built with CUDA (has_cuda is "
             f"{native.has_cuda}) and torch with CUDA (torch {torch.__version__})")
END
command -v "$sanitizer" >/dev/null || {
  echo "sanitize_gpu: no compute-sanitizer; set COMPUTE_SANITIZER" >&2
  exit 2
}

logs=build/sanitize_gpu
mkdir -p "$logs"
summary=
failed=0
run() {
  name=$1
  shift
  if "$@" >"$logs/$name.log" 2>&1; then verdict=passed; else verdict=FAILED failed=1; fi
  summary="$summary
$name: $verdict ($(grep -E '(passed|failed|skipped|error)' "$logs/$name.log" | tail -n 1))"
}

run plain "$python" -P -m pytest tests/gpu -q
# The caching allocator would hide steps outside of a tensor.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
for tool in memcheck racecheck synccheck initcheck; do
  run "$tool" "$sanitizer" --tool "$tool" --error-exitcode 9 --target-processes all \
    "$python" -P -m pytest tests/gpu -q -x -k 'not captured'
done

echo "date: $(date -u +%Y-%m-%dT%H:%M:%SZ)"
echo "commit: $(git rev-parse HEAD 2>/dev/null)"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
echo "$summary"
exit "$failed"
